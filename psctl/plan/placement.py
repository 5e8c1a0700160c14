"""Which hosts hold the servers."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.orders import HostOrder
from psctl.plan.cost import ASSUMED_RATE, Port, sharded_servers


def ports(hosts: Sequence[HostOrder], servers: Sequence[int] = ()) -> list[Port]:
    """Return the hosts as ports, with `servers` (a host index for each server) counted in."""
    return [
        Port(host.name, host.rate or ASSUMED_RATE, host.workers, sum(1 for at in servers if at == index))
        for index, host in enumerate(hosts)
    ]


def place_servers(hosts: Sequence[HostOrder], wanted: int | None, size: float) -> list[int]:
    """Return the host index of each server; empty when none may be placed.

    `wanted` None asks for as many as serve best: the hosts without workers alone, or every host that may serve,
    whichever is predicted faster for `size` bytes. A single host gets two, so that sums use two cores.
    A given number is dealt out in turn, hosts without workers first, for their ports are idle.
    """
    may = [index for index, host in enumerate(hosts) if host.may_serve]
    if not may or wanted == 0:
        return []
    free = [index for index in may if not hosts[index].workers]
    if wanted is not None:
        order = free + [index for index in may if hosts[index].workers]
        return sorted(order[turn % len(order)] for turn in range(wanted))
    if len(hosts) == 1:
        return [0] * min(2, max(1, hosts[0].workers))
    choices = [chosen for chosen in (free, may) if chosen]
    return min(choices, key=lambda chosen: sharded_servers(size, ports(hosts, chosen)).seconds)
