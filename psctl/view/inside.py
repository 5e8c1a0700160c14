"""A host of `topo -o json` arranged for drawing: the tree of its slots, and what joins devices beside the tree.

Every drawing (terminal, dot, svg) begins here, so that all show the same machine. The tree is found breadth first from
the processors over PCIe edges, and over whatever joins a NIC: each device hangs below the one that reached it. An edge
that is not in the tree is a cable beside it: NVLink, xGMI, what joins the processors. Documents may come from anywhere:
a device that no edge reaches hangs on the processor of its NUMA node, and where there is none it stands alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from psctl.topology.graph import EDGE_TYPES, bonded
from psctl.view import labels
from psctl.view.text import one_line

Document = Mapping[str, Any]

CLOSED = frozenset({"ring", "bidirectional-ring", "multi-ring"})
"""Strategies whose groups are rings: their last device sends to the first."""

OPEN = frozenset({"chain", "pipelined-chain"})
"""Strategies whose groups are chains."""

COPY = "copy"
"""Type of a relation that tells what a copy between two devices carried, where no matrix has a word for the pair."""

INNER = ("cpu", "switch")
"""Kinds of device that others hang on."""


class Branch(msgspec.Struct, frozen=True):
    """A device, the edge to the one above it (None: nothing tells of one), and what hangs below."""

    device: Document
    link: Document | None
    below: tuple[Branch, ...] = ()

    @property
    def id(self) -> str:
        """The device's id, harmless."""
        return one_line(str(self.device["id"]))

    def walk(self) -> Iterable[Branch]:
        """Yield this branch and all below it."""
        yield self
        for branch in self.below:
            yield from branch.walk()


class Inside(msgspec.Struct, frozen=True):
    """What is inside a host. `cables` are the edges beside the tree, `hubs` the switches that only cables reach."""

    roots: tuple[Branch, ...]
    cables: tuple[Document, ...]
    relations: tuple[Document, ...]
    hubs: tuple[Document, ...] = ()

    def branches(self) -> list[Branch]:
        """Return all branches, those above first."""
        return [branch for root in self.roots for branch in root.walk()]


def is_edge(link: Document) -> bool:
    """Whether a link is a cable or a slot; else it only tells of a pair."""
    word = str(link["type"])
    return word in EDGE_TYPES or (bonded(word) > 0 and link.get("switched") is False)


def inside(host: Document) -> Inside:
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
    above = _above(devices, slots)
    hub_ids = {str(hub["id"]) for hub in hubs}
    below: dict[str | None, list[str]] = {}
    for key, (parent, _) in above.items():
        if key not in hub_ids:
            below.setdefault(parent, []).append(key)
    used = {id(link) for _, link in above.values() if link is not None}
    cables = tuple(link for link in edges if id(link) not in used)
    return Inside(tuple(_branches(None, below, above, devices)), cables, relations, hubs)


def _above(
    devices: Mapping[str, Document], slots: Mapping[str, Sequence[tuple[str, Document]]]
) -> dict[str, tuple[str | None, Document | None]]:
    """Return, for each device, the one that it hangs on and the edge between; breadth first from the processors."""
    cpus = [key for key, device in devices.items() if device["kind"] == "cpu"]
    near = {devices[key].get("numa"): key for key in reversed(cpus)}
    near.pop(None, None)  # a processor whose node is not known is near to nothing
    above: dict[str, tuple[str | None, Document | None]] = dict.fromkeys(cpus, (None, None))
    _spread(list(cpus), slots, above)
    tops = [key for key, device in devices.items() if device["kind"] == "switch"] + list(devices)
    for key in tops:  # what no processor reaches: its topmost switch hangs on the processor of its node
        if key not in above:
            above[key] = (near.get(devices[key].get("numa")), None)
            _spread([key], slots, above)
    return {key: above[key] for key in devices}


def _spread(
    queue: list[str],
    slots: Mapping[str, Sequence[tuple[str, Document]]],
    above: dict[str, tuple[str | None, Document | None]],
) -> None:
    while queue:
        key = queue.pop(0)
        for other, link in slots[key]:
            if other not in above:
                above[other] = (key, link)
                queue.append(other)


def _branches(
    parent: str | None,
    below: Mapping[str | None, Sequence[str]],
    above: Mapping[str, tuple[str | None, Document | None]],
    devices: Mapping[str, Document],
) -> Iterable[Branch]:
    """Inner devices come before leaves, GPUs before NICs; else in the order of the document."""
    order = {"cpu": 0, "switch": 0, "gpu": 1, "nic": 2}
    for key in sorted(below.get(parent, ()), key=lambda key: order.get(str(devices[key]["kind"]), 3)):
        yield Branch(devices[key], above[key][1], tuple(_branches(key, below, above, devices)))


MANY = 4
"""So many hosts that are alike are drawn once."""

_OWN = ("addresses", "bus")
"""What even machines that are alike have each their own of."""


def folded(hosts: Sequence[Document]) -> list[Document]:
    """Return the hosts to draw: MANY or more that are alike in all but their addresses become one with all names.

    Hosts that failed, or have anything amiss, stay by themselves.
    """
    alike: dict[str, list[Document]] = {}
    for index, host in enumerate(hosts):
        alike.setdefault(_likeness(host) or str(index), []).append(host)
    drawn: list[Document] = []
    for same in alike.values():
        if len(same) < MANY:
            drawn += same
            continue
        devices = [{k: v for k, v in device.items() if k not in _OWN} for device in same[0].get("devices") or []]
        names = labels.ranges([one_line(str(host["name"])) for host in same])
        drawn.append({**same[0], "devices": devices, "name": f"{names} ({len(same)} hosts alike)"})
    return drawn


def _likeness(host: Document) -> str:
    """Return a text that is the same for hosts that are alike; "" for one that has to stand alone."""
    if host.get("error") or host.get("problems"):
        return ""
    devices = [sorted((k, repr(v)) for k, v in d.items() if k not in _OWN) for d in host.get("devices") or []]
    links = [sorted((k, repr(v)) for k, v in link.items()) for link in host.get("links") or []]
    return repr((devices, links, host.get("labels"), host.get("cores"), labels.gibibytes(host.get("memory"))))


def word_of(matrix: Mapping[frozenset[str], str], a: str, b: str) -> str:
    """Return what a matrix says of a pair: X for a device and itself, "" where nothing is said."""
    return "X" if a == b else matrix.get(frozenset((a, b)), "")


def matrix_of(host: Document) -> tuple[list[str], dict[frozenset[str], str]]:
    """Return the devices that a host's matrix tells of, in order, and the words of the pairs.

    Relations, and the cables that a matrix has words for too (NV2); a pair without a word is not in it.
    """
    words: dict[frozenset[str], str] = {}
    for link in host.get("links") or []:
        if link["type"] != COPY and (not is_edge(link) or bonded(str(link["type"]))):
            words.setdefault(frozenset((str(link["a"]), str(link["b"]))), one_line(str(link["type"])))
    told = {key for pair in words for key in pair}
    return [str(device["id"]) for device in host.get("devices") or [] if str(device["id"]) in told], words


def rings_of(strategy: Document | None) -> list[tuple[list[str], float | None]]:
    """Return the groups of a suggestion, each with the share of the bytes that it carries, None where that is open."""
    if not strategy:
        return []
    groups = [[str(member) for member in group] for group in strategy.get("groups") or []]
    shares = list(strategy.get("shares") or [])
    return [(group, float(shares[i]) if i < len(shares) else None) for i, group in enumerate(groups) if group]


def steps(strategy: Document | None, group: Sequence[str]) -> list[tuple[str, str]]:
    """Return who sends to whom in a group, by the strategy's name; nothing for groups that are mere sets."""
    name = str(strategy["name"]) if strategy else ""
    if len(group) < 2 or name not in CLOSED | OPEN:
        return []
    pairs = list(itertools.pairwise(group))
    return [*pairs, (group[-1], group[0])] if name in CLOSED and len(group) > 2 else pairs


def place(hosts: Mapping[str, Document], member: str) -> tuple[str, str] | None:
    """Return which host and device a member of a group is: "GPU0" where there is one host, else "node-a/GPU0".

    None for a member that is no device: a host, or a rank.
    """
    for name, host in hosts.items():
        ids = {str(device["id"]) for device in host.get("devices") or []}
        inner = member.removeprefix(f"{name}/")
        if inner in ids and (inner != member or len(hosts) == 1):
            return name, inner
    return None
