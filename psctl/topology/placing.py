"""Which worker sits where: its GPU, the NIC that is its own, the processor beside them; and which hosts hold servers.

A worker's bytes should leave by the NIC that is closest to its GPU (PIX before PXB, PHB, NODE, SYS), and workers that
are equally near several NICs should spread over them. Servers want the NICs of hosts without GPUs first; how many bytes
each holds is BytePS's split (OSDI 2020, FORMULAS 2.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from psctl.topology.graph import ClusterGraph, Device, HostGraph
from psctl.topology.paths import Router

NEARNESS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}
"""Words of a matrix from near to far; others are farther still."""

FAR = 5


class Seat(msgspec.Struct, frozen=True):
    """The place of a worker: its rank on the host, its GPU and NIC ("" when the host has none), its NUMA node."""

    rank: int
    gpu: str
    nic: str
    numa: int | None


class Holder(msgspec.Struct, frozen=True):
    """A host that holds servers: how many, and which part of the parameters' bytes all of them have."""

    host: str
    share: Fraction
    count: int = 1


def seats(graph: HostGraph) -> tuple[Seat, ...]:
    """Return the seat of each worker of a host: a worker a GPU in their order, or one where there is none.

    Each GPU gets one of the NICs that are nearest to it, those with the widest path first, such that as few GPUs as
    possible share one.
    """
    gpus = graph.of_kind("gpu")
    if not gpus:
        nics = sorted(_usable(graph), key=lambda nic: -(nic.bandwidth or 0.0))
        first = nics[0] if nics else None
        return (Seat(0, "", first.id if first else "", first.numa if first else _only_node(graph)),)
    own = _spread({gpu.id: _near(graph, gpu) for gpu in gpus})
    nodes = {gpu.id: _node(graph, gpu) for gpu in gpus}
    return tuple(Seat(rank, gpu.id, own.get(gpu.id, ""), nodes[gpu.id]) for rank, gpu in enumerate(gpus))


def holders(cluster: ClusterGraph, count: int | None = None) -> tuple[Holder, ...]:
    """Return which hosts hold servers, and how much.

    With n hosts that have workers and k that only serve (never more than n of them), and D = n² + kn - 2k: each of the
    k has 2(n-1)/D of the bytes, each of the n has (n-k)/D; all NICs are busy for the same time, 2n(n-1)/D bytes each
    for one byte synchronised. Hosts whose part is nothing are left out.

    Args:
        cluster: the hosts; their roles say what each may hold. Where a host has GPUs, those without only serve.
        count: number of servers in all; None for one a host. Hosts with larger parts get more.

    Returns:
        Hosts that only serve first; the parts add up to 1.
    """
    working, serving = _sides(cluster)
    n, k = len(working), min(len(serving), len(working))
    may = {host.name for host in cluster.hosts if "server" in host.roles}
    helpers = serving[:k]
    if n == 0:
        return ()
    if n == 1:
        parts = {helpers[0]: Fraction(1)} if helpers else {working[0]: Fraction(1)}
    else:
        whole = n * n + k * n - 2 * k
        parts = dict.fromkeys(helpers, Fraction(2 * (n - 1), whole)) | dict.fromkeys(working, Fraction(n - k, whole))
    kept = {host: part for host, part in parts.items() if part and host in may}
    total = sum(kept.values(), Fraction())
    shares = {host: part / total for host, part in kept.items()}
    return _counted(shares, count)


def _sides(cluster: ClusterGraph) -> tuple[list[str], list[str]]:
    """Names of the hosts with workers, and of those that only serve."""
    with_gpus = any(host.graph.of_kind("gpu") for host in cluster.hosts if "worker" in host.roles)
    working = [
        host.name for host in cluster.hosts if "worker" in host.roles and (host.graph.of_kind("gpu") or not with_gpus)
    ]
    return working, [host.name for host in cluster.hosts if host.name not in working and "server" in host.roles]


def _counted(shares: Mapping[str, Fraction], count: int | None) -> tuple[Holder, ...]:
    """Heads by largest remainders; with fewer heads than hosts, the largest parts get one and share all."""
    if count is None:
        return tuple(Holder(host, share) for host, share in shares.items())
    order = sorted(shares, key=lambda host: -shares[host])[: max(1, count)]
    total = sum((shares[host] for host in order), Fraction())
    heads = dict.fromkeys(order, 1)
    while sum(heads.values()) < count:
        heads[max(order, key=lambda host: shares[host] / (heads[host] + 1))] += 1
    return tuple(Holder(host, shares[host] / total, heads[host]) for host in order)


def _usable(graph: HostGraph) -> list[Device]:
    """NICs whose port is not known to be dead."""
    return [nic for nic in graph.of_kind("nic") if nic.bandwidth is None or nic.bandwidth > 0]


def _near(graph: HostGraph, gpu: Device) -> list[str]:
    """The NICs nearest to a GPU, the one with the widest path first."""
    words = {link.ends: NEARNESS.get(link.type, FAR) for link in graph.relations}
    paths = Router(graph.devices, graph.edges).paths(gpu.id)
    kinds = {device.id: device.kind for device in graph.devices}
    rows = []
    for nic in _usable(graph):
        path = paths.get(nic.id)
        level = words.get(frozenset((gpu.id, nic.id)))
        if level is None:
            level = _level([kinds[ident] for ident in path.devices]) if path else FAR
        width = min(path.bandwidth if path else 0.0, nic.bandwidth or float("inf"))
        rows.append((level, -width, nic.id))
    return [ident for level, _, ident in sorted(rows, key=lambda row: row[:2]) if level == min(rows)[0]]


def _level(kinds: Sequence[str]) -> int:
    """What a matrix would call a path: by how many switches and processors are on it."""
    cpus = kinds.count("cpu")
    if cpus:
        return NEARNESS["PHB"] if cpus == 1 else NEARNESS["SYS"]
    return NEARNESS["PIX"] if kinds.count("switch") <= 1 else NEARNESS["PXB"]


def _spread(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Give each GPU one of its NICs so that the fullest NIC has as few as possible.

    GPUs choose in turn the emptiest; then any chain of GPUs that can each move to another NIC and so even out a
    difference of two is moved along.
    """
    own: dict[str, str] = {}
    users: dict[str, list[str]] = {nic: [] for nics in choices.values() for nic in nics}
    for gpu, nics in choices.items():
        if nics:
            own[gpu] = min(nics, key=lambda nic: len(users[nic]))
            users[own[gpu]].append(gpu)
    while chain := next(filter(None, (_chain(nic, users, choices) for nic in users)), None):
        for gpu, nic in chain:
            users[own[gpu]].remove(gpu)
            users[nic].append(gpu)
            own[gpu] = nic
    return own


def _chain(
    start: str, users: Mapping[str, Sequence[str]], choices: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Moves (GPU, to which NIC) that take one from a NIC to one with at least two fewer; none: []."""
    came: dict[str, tuple[str, str]] = {start: ("", "")}
    queue = [start]
    for nic in queue:
        if len(users[nic]) <= len(users[start]) - 2:
            moves = []
            while nic != start:
                gpu, before = came[nic]
                moves.append((gpu, nic))
                nic = before
            return moves
        for gpu in users[nic]:
            for other in choices[gpu]:
                if other not in came:
                    came[other] = (gpu, nic)
                    queue.append(other)
    return []


def _node(graph: HostGraph, gpu: Device) -> int | None:
    """The NUMA node of a GPU: as told, else that of the nearest processor."""
    if gpu.numa is not None:
        return gpu.numa
    paths = Router(graph.devices, graph.edges).paths(gpu.id)
    near = [(len(paths[cpu.id].devices), cpu) for cpu in graph.of_kind("cpu") if cpu.id in paths]
    return min(near, key=lambda row: row[0])[1].numa if near else _only_node(graph)


def _only_node(graph: HostGraph) -> int | None:
    cpus = graph.of_kind("cpu")
    return cpus[0].numa if len(cpus) == 1 else None
