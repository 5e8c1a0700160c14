"""The GPU, NIC and NUMA node of each worker of a host.

A worker should send through the NIC that is closest to its GPU (PIX before PXB, PHB, NODE, SYS), and workers that
are equally near several NICs should spread over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology.graph import Device, HostGraph
from psctl.topology.host.paths import Router
from psctl.topology.host.pcie_derivation import LEVELS

FAR = 1 + max(LEVELS.values())
"""Distance of a NIC without a path or a link type of PCIe."""


class WorkerPlacement(msgspec.Struct, frozen=True):
    """The placement of a worker: its rank on the host, its GPU and NIC ("" when the host has none), its NUMA node."""

    rank: int
    gpu: str
    nic: str
    numa: int | None


def place_workers(graph: HostGraph) -> tuple[WorkerPlacement, ...]:
    """Return the placement of each worker of a host: one a GPU in their order, or one worker where there is no GPU.

    Each GPU gets one of the NICs that are nearest to it, those with the widest path first, such that as few GPUs as
    possible share one.
    """
    gpus = graph.of_kind("gpu")
    if not gpus:
        nics = sorted(_usable(graph), key=lambda nic: -(nic.bandwidth or 0.0))
        first = nics[0] if nics else None
        return (WorkerPlacement(0, "", first.id if first else "", first.numa if first else _only_node(graph)),)
    own = _spread({gpu.id: _near(graph, gpu) for gpu in gpus})
    nodes = {gpu.id: _node(graph, gpu) for gpu in gpus}
    return tuple(WorkerPlacement(rank, gpu.id, own.get(gpu.id, ""), nodes[gpu.id]) for rank, gpu in enumerate(gpus))


def _usable(graph: HostGraph) -> list[Device]:
    """Return the NICs whose port is not known to be down."""
    return [nic for nic in graph.of_kind("nic") if nic.bandwidth is None or nic.bandwidth > 0]


def _near(graph: HostGraph, gpu: Device) -> list[str]:
    """Return the NICs nearest to a GPU, the one with the widest path first."""
    levels = {link.ends: LEVELS.get(link.type, FAR) for link in graph.relations}
    paths = Router(graph.devices, graph.edges).paths(gpu.id)
    kinds = {device.id: device.kind for device in graph.devices}
    rows = []
    for nic in _usable(graph):
        path = paths.get(nic.id)
        level = levels.get(frozenset((gpu.id, nic.id)))
        if level is None:
            level = _level([kinds[ident] for ident in path.devices]) if path else FAR
        width = min(path.bandwidth if path else 0.0, nic.bandwidth or float("inf"))
        rows.append((level, -width, nic.id))
    return [ident for level, _, ident in sorted(rows, key=lambda row: row[:2]) if level == min(rows)[0]]


def _level(kinds: Sequence[str]) -> int:
    """Return the level of a path by the number of switches and processors on it."""
    cpus = kinds.count("cpu")
    if cpus:
        return LEVELS["PHB"] if cpus == 1 else LEVELS["SYS"]
    return LEVELS["PIX"] if kinds.count("switch") <= 1 else LEVELS["PXB"]


def _spread(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Assign each GPU one of its NICs so that the most shared NIC has as few GPUs as possible.

    Each GPU in turn takes the least used of its NICs; then every chain of GPUs that can each move to another NIC, and
    so even out a difference of two, is moved.
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
    """Return moves (GPU, new NIC) that shift one GPU to a NIC with at least two fewer; [] if there are none."""
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
    """Return the NUMA node of a GPU: as reported, else that of the nearest processor."""
    if gpu.numa is not None:
        return gpu.numa
    paths = Router(graph.devices, graph.edges).paths(gpu.id)
    near = [(len(paths[cpu.id].devices), cpu) for cpu in graph.of_kind("cpu") if cpu.id in paths]
    return min(near, key=lambda row: row[0])[1].numa if near else _only_node(graph)


def _only_node(graph: HostGraph) -> int | None:
    cpus = graph.of_kind("cpu")
    return cpus[0].numa if len(cpus) == 1 else None
