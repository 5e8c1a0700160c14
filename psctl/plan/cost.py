"""Predicted seconds of one synchronisation, by closed forms on nominal rates.

Every host has one full-duplex port of B bytes/s (payload); processes of one host meet through its loopback. N is the
bytes of gradients of one worker, n the number of workers, k of servers.

    ring over all ranks      2 (n-1)/n N / B_slowest + 2 (n-1) alpha          (Patarasuk and Yuan 2009)
    sharded servers          push, then pull: each phase lasts as long as the busiest port or loopback:
                             out(h) = workers(h) N (1 - servers(h)/k),  in(h) = servers(h) N/k (n - workers(h))
                             and the same with in and out exchanged for the pull; 2 alpha a phase

These are the first word only: flow simulation on the measured topology takes this room over when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ASSUMED_RATE = 0.956 * 1e9 / 8
"""Payload bytes/s of a port whose speed nothing tells: 1 Gbit/s less headers at an MTU of 1500."""

LOOPBACK_RATE = 4e9
"""Bytes/s that the processes of one host move between them, all together: sealed sockets, measured on two cores."""

ALPHA = 1e-4
"""Seconds a message between hosts waits beside its bytes: a switch, two kernels, two processes woken."""


class Port(msgspec.Struct, frozen=True):
    """A host as the closed forms see it."""

    name: str
    rate: float  # payload bytes/s, one direction
    workers: int
    servers: int = 0


class Cost(msgspec.Struct, frozen=True):
    """A prediction: seconds, steps, bytes that the busiest rank sends, and what it waits for."""

    seconds: float
    steps: int
    bytes_per_rank: float
    bottleneck: str


def ring(size: float, ports: Sequence[Port]) -> Cost:
    """Return the cost of a ring all-reduce of `size` bytes over all workers in host order."""
    ranks = sum(port.workers for port in ports)
    if ranks < 2:
        return Cost(0.0, 0, 0.0, "none: one worker")
    used = [port for port in ports if port.workers]
    moved = 2 * (ranks - 1) / ranks * size
    steps = 2 * (ranks - 1)
    inside = moved * max(port.workers for port in used) / LOOPBACK_RATE
    if len(used) == 1:
        return Cost(inside, steps, moved, f"{used[0].name} loopback")
    slowest = min(used, key=lambda port: port.rate)
    across = moved / slowest.rate
    seconds = max(across, inside) + steps * ALPHA
    return Cost(seconds, steps, moved, f"{slowest.name} port" if across >= inside else "loopback")


def sharded_servers(size: float, ports: Sequence[Port]) -> Cost:
    """Return the cost of pushing `size` bytes a worker to all servers and pulling as many, shards spread evenly."""
    workers = sum(port.workers for port in ports)
    servers = sum(port.servers for port in ports)
    assert workers > 0 < servers, "a parameter server needs workers and servers"
    worst, bottleneck = 0.0, "none"
    for port in ports:
        outward = port.workers * size * (1 - port.servers / servers)
        inward = port.servers * size / servers * (workers - port.workers)
        inside = port.workers * size * port.servers / servers
        for seconds, what in (
            (max(outward, inward) / port.rate, f"{port.name} port"),
            (inside / LOOPBACK_RATE, f"{port.name} loopback"),
        ):
            if seconds > worst:
                worst, bottleneck = seconds, what
    alpha = ALPHA if sum(1 for port in ports if port.workers or port.servers) > 1 else 0.0
    return Cost(2 * worst + 4 * alpha, 2, 2 * size, bottleneck)
