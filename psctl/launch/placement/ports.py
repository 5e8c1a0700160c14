"""`network.ports`: the number of ports that a job's listeners need on each host, and the processes that hold others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.job.leadership_messages import FEWEST_VOTERS
from psctl.launch.host_programs import NETWORK_CHECKS, run_program
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.placement.roster import JobHosts, servers_of
from psctl.orders import HostOrder
from psctl.plan.server_placement import server_placements
from psctl.remote.shell import Shell
from psctl.spec.job import JobSpec
from psctl.types import HostName

SUGGESTED = 100
"""Ports of a range that hints suggest."""

SHOWN = 4
"""Holders of ports that an error names, a host."""

LOOPBACK = "127.0.0.1"
"""Where each host's MASTER_PORT is; elsewhere its listeners bind the host's own address."""

Needs = dict[str, int]
"""Ports by role."""


class TakenPort(msgspec.Struct, frozen=True):
    """Ports that cannot be bound. `pid` is 0 and `program` "" where the host does not let psctl see the holder."""

    port: int
    pid: int = 0
    program: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return f"{self.port}, by a process that only root sees"
        return f"{self.port}, by pid {self.pid} ({self.program})"


class PortUse(msgspec.Struct, frozen=True):
    """The range on one host: how many ports are free, and the others."""

    free: int
    taken: list[TakenPort] = []


_PORT_USE = msgspec.json.Decoder(PortUse)


def needed(job: JobSpec, job_hosts: JobHosts) -> dict[str, Needs]:
    """Return the ports that a job needs on each of its hosts, by role; what its plan may choose counts at its most.

    Where the strategy is still to be chosen, workers and servers do not listen at the same time.
    """
    strategy, hosts = job.sync.strategy, job_hosts.hosts
    found: dict[str, Needs] = {host.name: {} for host in hosts}
    head = {"coordinator": 1} | ({"torch's store": 1} if len(hosts) > 1 else {})
    found[hosts[0].name] = dict(head)
    if len(hosts) >= FEWEST_VOTERS:  # each may become the head, and listens for the other agents
        found = {host.name: {"agent": 1} | head for host in hosts}
    for host in hosts:
        if host.workers and host.address == LOOPBACK:
            found[host.name]["MASTER_PORT"] = 1
    workers: Counter[str] = Counter()
    servers: Counter[str] = Counter()
    if strategy not in ("native", "ps") and sum(bool(host.workers) for host in hosts) > 1 and _on_processors(hosts):
        workers.update({host.name: host.workers for host in hosts})
    if strategy in ("auto", "ps"):
        for placement in server_placements(hosts, servers_of(job, sum(host.may_serve for host in hosts))):
            servers |= Counter(hosts[at].name for at in placement)
    for name, needs in found.items():
        if servers[name] or workers[name]:
            most = max(("servers", servers[name]), ("workers", workers[name]), key=lambda each: each[1])
            needs[most[0]] = most[1]
    return found


def look(
    span: tuple[int, int], reached: ReachedCluster, at: Mapping[str, str]
) -> dict[str, PortUse | errors.PsctlError]:
    """Ask hosts which ports of a range are free on their addresses.

    Args:
        span: first and last port.
        reached: the cluster.
        at: the address of each host to check.
    """

    def one(name: HostName, shell: Shell) -> PortUse:
        question = {"host": at[name], "first": span[0], "last": span[1]}
        return run_program(shell, reached.sites[name].executable, NETWORK_CHECKS, "ports", question, _PORT_USE)

    found = reached.fleet.each(one, names=at)
    return {str(name): outcome.error or outcome.value for name, outcome in found.items()}


def check(reached: ReachedCluster, job_hosts: JobHosts, job: JobSpec) -> None:
    """Refuse a job whose listeners do not fit into `network.ports`; without a range there is nothing to ask.

    Raises:
        PortTaken: it names every host that lacks ports, what needs them, and the holders of the others.
        HostUnreachable and others: a host could not be checked.
    """
    chosen = reached.chosen
    span = chosen.spec.network.ports
    if span is None:
        return
    at = {host.name: host.address for host in job_hosts.hosts}
    seen: dict[str, PortUse] = {}
    for name, answer in look(span, reached, at).items():
        if isinstance(answer, errors.PsctlError):
            raise answer
        seen[name] = answer
    if error := lacking(span, needed(job, job_hosts), seen, at, chosen.known.source):
        raise error


def lacking(
    span: tuple[int, int], needs: Mapping[str, Needs], seen: Mapping[str, PortUse], at: Mapping[str, str], file: str
) -> errors.PortTaken | None:
    """Return the error for hosts that have fewer free ports than a job needs there; None when none has.

    Args:
        span: `network.ports`.
        needs: of each host, by role.
        seen: what each host has free.
        at: the hosts' addresses; hosts with the same one share its ports.
        file: the cluster file's name, for the hint.
    """
    short, most = [], 0
    for names in grouped((at[name], name) for name in needs).values():
        together: Counter[str] = Counter()
        for name in names:
            together.update(needs[name])
        span_here = seen[names[0]]
        most = max(most, together.total() + len(span_here.taken))
        if together.total() > span_here.free:
            short.append(_say(", ".join(names), together, span_here))
    if not short:
        return None
    first = min(span[0], 65536 - max(most, SUGGESTED))
    hint = f"give network.ports at least {most} ports{f' in {file}' if file else ''}, "
    hint += f"such as {first}-{first + max(most, SUGGESTED) - 1}, or end what holds them"
    return errors.PortTaken(f"network.ports {span[0]}-{span[1]} is too small: {'; '.join(short)}", hint, file)


def _say(names: str, needs: Mapping[str, int], seen: PortUse) -> str:
    roles = ", ".join(f"{role} {count}" for role, count in needs.items())
    held = [str(each) for each in seen.taken[:SHOWN]]
    held += [f"{len(seen.taken) - SHOWN} more"] if len(seen.taken) > SHOWN else []
    total = sum(needs.values())
    holders = f" (taken: {'; '.join(held)})" if held else ""
    return f"{names} needs {total} port{'s' if total > 1 else ''} ({roles}) and has {seen.free} free{holders}"


def _on_processors(hosts: Sequence[HostOrder]) -> bool:
    """Whether ranks sum in the hosts' memory, so that psctl's own connections carry the collectives."""
    return any(host.workers > host.gpus for host in hosts)
