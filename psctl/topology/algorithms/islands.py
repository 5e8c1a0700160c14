"""Groups for hierarchical all-reduces: devices that are closer to each other than to the others, by level.

The levels inside a host are GPUs joined by NVLink or xGMI, GPUs behind one PCIe switch (then behind several, up to the
processor), and GPUs of one NUMA node. Outside follow hosts, then racks by their label. A group of a level consists of
whole groups of the level below it, so that sums over groups can be summed: where an NVLink group spans two NUMA nodes,
the nodes are not a level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from psctl.grouping import grouped
from psctl.topology.algorithms.direct_links import is_direct
from psctl.topology.graph import ClusterGraph, HostGraph, components
from psctl.types import RACK

Kind = Literal["nvlink", "pcie", "numa", "host", "rack"]
Groups = tuple[tuple[str, ...], ...]


class Level(msgspec.Struct, frozen=True):
    """One level: its kind, and the devices of each group."""

    kind: Kind
    groups: Groups


def ranks(cluster: ClusterGraph) -> tuple[str, ...]:
    """Return the ranks: the GPUs of the hosts with the role worker, or these hosts where none has a GPU.

    Returns:
        The device ids, each preceded by its host's name and "/" where the cluster has several hosts; or host names.
    """
    hosts = [host for host in cluster.hosts if "worker" in host.roles]
    several = len(cluster.hosts) > 1
    gpus = tuple(name(host.name, gpu.id, several) for host in hosts for gpu in host.graph.of_kind("gpu"))
    return gpus or tuple(host.name for host in hosts)


def name(host: str, device: str, several: bool) -> str:
    """Return the name of a device: its id, preceded by the host's name and "/" where there are several hosts."""
    return f"{host}/{device}" if several else device


def islands(graph: HostGraph, kind: Kind = "nvlink") -> Groups:
    """Return the groups of a host's GPUs of one kind, even where they are a single group.

    Args:
        graph: the host.
        kind: nvlink (joined by NVLink or xGMI, directly or through switches), pcie (plugged into the same PCIe switch),
            numa (the same NUMA node, or the same processor where nodes are unknown), host (all).
    """
    gpus = [gpu.id for gpu in graph.of_kind("gpu")]
    if kind == "nvlink":
        switches = {device.id for device in graph.of_kind("switch")}
        pairs = [link.ends for link in graph.edges if is_direct(link) and link.ends <= switches | set(gpus)]
        return _joined(gpus, pairs)
    if kind == "pcie":
        return _alike(gpus, _nearest(graph))
    if kind == "numa":
        return _alike(gpus, _nodes(graph))
    return (tuple(gpus),) if gpus else ()


def hierarchy(cluster: ClusterGraph) -> tuple[Level, ...]:
    """Return the levels of a cluster from inside to outside, without levels of a single group.

    Returns:
        Each level has every rank, named as by `ranks`, in exactly one group; its groups consist of whole groups of the
        level before.
    """
    everything = ranks(cluster)
    raw: list[tuple[Kind, list[tuple[str, ...]]]] = [
        ("nvlink", _inside(cluster, lambda graph: islands(graph, "nvlink"))),
        ("pcie", _inside(cluster, lambda graph: islands(graph, "pcie"))),
        ("pcie", _inside(cluster, _roots)),
        ("numa", _inside(cluster, lambda graph: islands(graph, "numa"))),
        ("host", _inside(cluster, lambda graph: islands(graph, "host"))),
        ("rack", _racks(cluster, everything)),
    ]
    hosts = _joined(everything, raw[4][1])
    levels: list[Level] = []
    last: Groups = tuple((rank,) for rank in everything)
    for kind, groups in raw:
        joined = _joined(everything, [*last, *groups])
        if joined != last and len(joined) > 1:
            levels.append(Level("host" if joined == hosts else kind, joined))
        last = joined
    return tuple(levels)


def _inside(cluster: ClusterGraph, find: Callable[[HostGraph], Groups]) -> list[tuple[str, ...]]:
    several = len(cluster.hosts) > 1
    return [
        tuple(name(host.name, ident, several) for ident in group)
        for host in cluster.hosts
        for group in find(host.graph)
    ]


def _racks(cluster: ClusterGraph, everything: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ranks of each rack; hosts without the label are in no rack."""
    racks: dict[str, list[str]] = {}
    for host in cluster.hosts:
        if RACK in host.labels:
            own = [rank for rank in everything if rank == host.name or rank.startswith(f"{host.name}/")]
            racks.setdefault(host.labels[RACK], []).extend(own)
    return [tuple(group) for group in racks.values()]


def _joined(members: Sequence[str], groups: Iterable[Iterable[str]]) -> Groups:
    """Return the members in connected groups, in their order; other nodes (switches) may connect them."""
    links, wanted = [list(group) for group in groups], set(members)
    found = components(itertools.chain(members, *links), links)
    return tuple(filter(None, (tuple(ident for ident in group if ident in wanted) for group in found)))


def _alike(members: Sequence[str], key: Mapping[str, str]) -> Groups:
    """Return the members grouped by their key; a member without a key is a group of its own."""
    groups = grouped((f"of {key[ident]}" if ident in key else ident, ident) for ident in members)
    return tuple(tuple(group) for group in groups.values())


def _slots(graph: HostGraph) -> dict[str, list[str]]:
    """Return the devices that each device reaches over one PCIe slot."""
    slots = [(link.a, link.b) for link in graph.edges if link.type == "PCIe"]
    return grouped(ends for a, b in slots for ends in ((a, b), (b, a)))


def _nearest(graph: HostGraph) -> dict[str, str]:
    """Return the PCIe switch that each GPU is plugged into."""
    near, switches = _slots(graph), {device.id for device in graph.of_kind("switch")}
    found = {gpu.id: [ident for ident in near.get(gpu.id, []) if ident in switches] for gpu in graph.of_kind("gpu")}
    return {gpu: idents[0] for gpu, idents in found.items() if idents}


def _roots(graph: HostGraph) -> Groups:
    """Return the GPUs below the same port of a processor, through any number of switches."""
    kept = {device.id for device in graph.devices if device.kind in ("switch", "gpu")}
    pairs = [link.ends for link in graph.edges if link.type == "PCIe" and link.ends <= kept]
    return _joined([gpu.id for gpu in graph.of_kind("gpu")], pairs)


def _nodes(graph: HostGraph) -> dict[str, str]:
    """Return the NUMA node of each GPU, or the processor to which its slot leads."""
    near = _slots(graph)
    cpus = {device.id: device for device in graph.of_kind("cpu")}
    found = {}
    for gpu in graph.of_kind("gpu"):
        if gpu.numa is not None:
            found[gpu.id] = str(gpu.numa)
            continue
        seen = [gpu.id]
        for ident in seen:
            if ident not in cpus:
                seen += [other for other in near.get(ident, []) if other not in seen]
        above = next((cpus[ident] for ident in seen if ident in cpus), None)
        if above is not None:
            found[gpu.id] = above.id if above.numa is None else str(above.numa)
    return found
