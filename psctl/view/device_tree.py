"""A host of `topo -o json` arranged for drawing: the tree of its slots, and the cables between devices of the tree.

All drawings (terminal, rows, dot, svg) use it, so that they show the same machine. The tree is built breadth first from
the processors over PCIe edges and the edges of NICs: the parent of a device is the one that reached it first. Other
edges are cables: NVLink, xGMI, links between processors. A device that no edge reaches is placed below the processor of
its NUMA node, or is a root where there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.grouping import grouped
from psctl.topology.graph import EDGE_TYPES, bonded
from psctl.types import Document
from psctl.view import labels
from psctl.view.text import one_line

CLOSED = frozenset({"ring", "bidirectional-ring", "multi-ring"})
"""Strategies whose groups are rings: their last device sends to the first."""

OPEN = frozenset({"chain", "pipelined-chain"})
"""Strategies whose groups are chains."""

COPY = "copy"
"""Type of a relation with a measured copy rate, for a pair of devices that no matrix describes."""

INNER = ("cpu", "switch")
"""Kinds of device that have children."""


class DeviceNode(msgspec.Struct, frozen=True):
    """A device, the edge to its parent (None when unknown), and its children."""

    device: Document
    link: Document | None
    below: tuple[DeviceNode, ...] = ()

    @property
    def id(self) -> str:
        """The device's id as one harmless line."""
        return one_line(self.device["id"])

    def walk(self) -> Iterable[DeviceNode]:
        """Yield this node and all below it."""
        yield self
        for node in self.below:
            yield from node.walk()


class DeviceTree(msgspec.Struct, frozen=True):
    """The devices of a host. `cables` are edges outside the tree, `hubs` the switches that only cables reach."""

    roots: tuple[DeviceNode, ...]
    cables: tuple[Document, ...]
    relations: tuple[Document, ...]
    hubs: tuple[Document, ...] = ()

    def nodes(self) -> list[DeviceNode]:
        """Return all nodes, parents first."""
        return [node for root in self.roots for node in root.walk()]


def is_edge(link: Document) -> bool:
    """Whether a link is a cable or a slot; otherwise it is a relation of a pair."""
    kind = str(link["type"])
    return kind in EDGE_TYPES or (bonded(kind) > 0 and link.get("switched") is False)


def device_tree(host: Document) -> DeviceTree:
    """Arrange a host.

    Args:
        host: an entry of `hosts`; `devices` and `links` may be absent.
    """
    devices = {str(device["id"]): device for device in host.get("devices") or []}
    links = [link for link in host.get("links") or [] if str(link["a"]) in devices and str(link["b"]) in devices]
    edges = [link for link in links if is_edge(link)]
    relations = tuple(link for link in links if not is_edge(link))
    slots: dict[str, list[tuple[str, Document]]] = {key: [] for key in devices}
    for link in edges:
        if link["type"] == "PCIe" or "nic" in {devices[str(link[end])]["kind"] for end in "ab"}:
            slots[str(link["a"])].append((str(link["b"]), link))
            slots[str(link["b"])].append((str(link["a"]), link))
    hubs = tuple(
        device for key, device in devices.items()
        if device["kind"] == "switch" and not slots[key] and any(key in (link["a"], link["b"]) for link in edges)
    )  # fmt: skip
    parents = _parents(devices, slots)
    hub_ids = {str(hub["id"]) for hub in hubs}
    below = grouped((parent, key) for key, (parent, _) in parents.items() if key not in hub_ids)
    used = {id(link) for _, link in parents.values() if link is not None}
    cables = tuple(link for link in edges if id(link) not in used)
    return DeviceTree(tuple(_build_nodes(None, below, parents, devices)), cables, relations, hubs)


def _parents(
    devices: Mapping[str, Document], slots: Mapping[str, Sequence[tuple[str, Document]]]
) -> dict[str, tuple[str | None, Document | None]]:
    """Return, for each device, its parent and the edge between them; breadth first from the processors."""
    cpus = [key for key, device in devices.items() if device["kind"] == "cpu"]
    near = {devices[key].get("numa"): key for key in reversed(cpus)}
    near.pop(None, None)  # a processor of an unknown node has no near devices
    parents: dict[str, tuple[str | None, Document | None]] = dict.fromkeys(cpus, (None, None))
    _spread(list(cpus), slots, parents)
    tops = [key for key, device in devices.items() if device["kind"] == "switch"] + list(devices)
    for key in tops:  # not reached by any processor: its topmost switch is placed below the processor of its node
        if key not in parents:
            parents[key] = (near.get(devices[key].get("numa")), None)
            _spread([key], slots, parents)
    return {key: parents[key] for key in devices}


def _spread(
    queue: list[str],
    slots: Mapping[str, Sequence[tuple[str, Document]]],
    parents: dict[str, tuple[str | None, Document | None]],
) -> None:
    while queue:
        key = queue.pop(0)
        for other, link in slots[key]:
            if other not in parents:
                parents[other] = (key, link)
                queue.append(other)


def _build_nodes(
    parent: str | None,
    below: Mapping[str | None, Sequence[str]],
    parents: Mapping[str, tuple[str | None, Document | None]],
    devices: Mapping[str, Document],
) -> Iterable[DeviceNode]:
    """Yield the children of a device: inner ones first, then GPUs, then NICs, else in the order of the document."""
    order = {"cpu": 0, "switch": 0, "gpu": 1, "nic": 2}
    for key in sorted(below.get(parent, ()), key=lambda key: order.get(str(devices[key]["kind"]), 3)):
        yield DeviceNode(devices[key], parents[key][1], tuple(_build_nodes(key, below, parents, devices)))


MIN_ALIKE = 4
"""This many equal hosts are drawn once."""

_INDIVIDUAL_KEYS = ("addresses", "bus")
"""Keys of a device that differ even between equal machines."""


def fold_alike_hosts(hosts: Sequence[Document]) -> list[Document]:
    """Return the hosts to draw: MIN_ALIKE or more that are equal in all but their addresses become one with all names.

    Hosts that failed or have problems stay separate.
    """
    alike = grouped((_alike_key(host) or str(index), host) for index, host in enumerate(hosts))
    drawn: list[Document] = []
    for same in alike.values():
        if len(same) < MIN_ALIKE:
            drawn += same
            continue
        devices = [_without_individual_keys(device) for device in same[0].get("devices") or []]
        names = labels.id_ranges([one_line(host["name"]) for host in same])
        drawn.append({**same[0], "devices": devices, "name": f"{names} ({len(same)} hosts alike)"})
    return drawn


def _without_individual_keys(device: Document) -> Document:
    return {key: value for key, value in device.items() if key not in _INDIVIDUAL_KEYS}


def _alike_key(host: Document) -> str:
    """Return a key that equal hosts share; "" for a host that is drawn separately."""
    if host.get("error") or host.get("problems"):
        return ""
    devices = [sorted(_without_individual_keys(device).items(), key=repr) for device in host.get("devices") or []]
    links = [sorted(link.items(), key=repr) for link in host.get("links") or []]
    return repr((devices, links, host.get("labels"), host.get("cores"), labels.format_memory(host.get("memory"))))


def matrix_entry(matrix: Mapping[frozenset[str], str], a: str, b: str) -> str:
    """Return the entry of a pair in a matrix: X for a device and itself, "" where there is none."""
    return "X" if a == b else matrix.get(frozenset((a, b)), "")


def matrix_of(host: Document) -> tuple[list[str], dict[frozenset[str], str]]:
    """Return the devices in a host's matrix, in order, and the entries of their pairs.

    Entries are relations, and the cables that a matrix names too (NV2).
    """
    entries: dict[frozenset[str], str] = {}
    for link in host.get("links") or []:
        if link["type"] != COPY and (not is_edge(link) or bonded(str(link["type"]))):
            entries.setdefault(frozenset((str(link["a"]), str(link["b"]))), one_line(link["type"]))
    named = {key for pair in entries for key in pair}
    return [str(device["id"]) for device in host.get("devices") or [] if str(device["id"]) in named], entries


def rings_of(strategy: Document | None) -> list[tuple[list[str], float | None]]:
    """Return the groups of a suggestion, each with its share of the bytes, None where it is not decided."""
    if not strategy:
        return []
    groups = [[str(member) for member in group] for group in strategy.get("groups") or []]
    shares = list(strategy.get("shares") or [])
    return [(group, float(shares[i]) if i < len(shares) else None) for i, group in enumerate(groups) if group]


def ring_steps(strategy: Document | None, group: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (sender, receiver) pairs of a ring or chain; none for groups of other strategies."""
    name = str(strategy["name"]) if strategy else ""
    if len(group) < 2 or name not in CLOSED | OPEN:
        return []
    pairs = list(itertools.pairwise(group))
    return [*pairs, (group[-1], group[0])] if name in CLOSED and len(group) > 2 else pairs


def locate_member(hosts: Mapping[str, Document], member: str) -> tuple[str, str] | None:
    """Return the host and device of a group's member: "GPU0" where there is one host, else "node-a/GPU0".

    None for a member that is no device: a host, or a rank.
    """
    for name, host in hosts.items():
        ids = {str(device["id"]) for device in host.get("devices") or []}
        inner = member.removeprefix(f"{name}/")
        if inner in ids and (inner != member or len(hosts) == 1):
            return name, inner
    return None
