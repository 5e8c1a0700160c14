"""The tree of a host laid out: how wide each device's box is, and where it stands. No drawing.

A device is as wide as its words or as all that hangs below it. GPUs and NICs share the lowest row, whatever they hang
on, so that cables below it can reach them; NICs of one parent stand in stacks at the right of its GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from psctl.view import labels
from psctl.view.canvas import Area, folded, text_width
from psctl.view.inside import INNER, Branch

Document = Mapping[str, Any]

LINE_HEIGHT = 1.35
"""Of a line of text, in its own size."""

PAD, GAP, LEVEL = 12.0, 10.0, 34.0
"""Pixels: within a panel, between boxes of a row, between rows."""

STACK = 4
"""NICs above one another."""

SPINE = 12.0
"""Pixels at the left of a stack for the line that its NICs hang on."""

DROP = 10.0
"""Pixels from the left of a GPU's box to its line, so that the rate fits between line and neighbour."""

NARROW = 66.0
"""Pixels that a box is wide at least."""


class Node(msgspec.Struct):
    """A device in its place within the panel. `level` counts from the processors; leaves share the lowest row."""

    branch: Branch
    lines: list[tuple[str, float, bool]]
    width: float
    height: float
    span: float = 0.0
    inner: list[Node] = []
    leaves: list[Node] = []
    stacks: list[list[Node]] = []
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        """The middle of its box."""
        return self.x + self.width / 2

    @property
    def area(self) -> Area:
        """Its box."""
        return Area(self.x, self.y, self.width, self.height)

    def all(self) -> list[Node]:
        """Return this node and all below it."""
        below = [
            node for part in (*self.inner, *self.leaves, *(n for s in self.stacks for n in s)) for node in part.all()
        ]
        return [self, *below]


FEW = 2
"""Devices that a finding may speak of to be marked on their boxes."""


class Words(msgspec.Struct, frozen=True):
    """What boxes say: kinds whose name the head tells are left out, few NICs are told of in full, findings marked."""

    same: Set[str]
    few: bool
    findings: Sequence[tuple[str, str]]
    host: Document


def node_of(branch: Branch, words: Words) -> Node:
    """Return a device and all below it, each with its words and as wide as these need."""
    device = branch.device
    kind = str(device["kind"])
    lines = [(labels.named(device["id"]), 12.0 if kind != "nic" else 11.0, True)]
    told = labels.about(device)
    if kind in words.same:
        told = [word for word in told if word != labels.named(device.get("name") or "")]
    if kind == "nic" and not words.few:
        told = told[-1:] if device.get("bandwidth") else []
        told = [word.removeprefix("port ") for word in told]
    if kind == "switch" and len(told) == 1 and not device.get("name"):
        told = []
    lines += [(part, 9.5, False) for word in told for part in folded(word, 150, 9.5)]
    width = max(text_width(text, size, bold) for text, size, bold in lines) + 14
    if marked(device, words.host, words.findings):
        width += 22  # room for the badge
    height = sum(size * LINE_HEIGHT for _, size, _ in lines) + 8
    node = Node(branch, lines, max(width, NARROW), height)
    nics = []
    for below in branch.below:
        child = node_of(below, words)
        if str(below.device["kind"]) in INNER:
            node.inner.append(child)
        elif below.device["kind"] == "nic":
            nics.append(child)
        else:
            node.leaves.append(child)
    rows = math.ceil(len(nics) / math.ceil(len(nics) / STACK)) if nics else 1
    node.stacks = [nics[i : i + rows] for i in range(0, len(nics), rows)]
    return node


def measure(node: Node) -> None:
    """Set how wide a node is with all below it; a processor's box is as wide as what hangs on it."""
    for child in node.inner:
        measure(child)
    widths = [child.span for child in node.inner] + [leaf.width for leaf in node.leaves]
    widths += [SPINE + stack[0].width for stack in node.stacks]
    below = sum(widths) + GAP * max(0, len(widths) - 1)
    cpu = node.branch.device["kind"] == "cpu"
    pad = 2 * GAP if cpu and widths else 0.0
    node.span = max(node.width, below) + pad
    if cpu:
        node.width = node.span - pad


def heights(node: Node, level: int, found: dict[int, float]) -> None:
    if str(node.branch.device["kind"]) in INNER:
        found[level] = max(found.get(level, 0.0), node.height)
        for child in node.inner:
            heights(child, level + 1, found)


def row_height(node: Node) -> float:
    leaves = [leaf.height for leaf in node.leaves]
    return max([0.0, *leaves, *(sum(nic.height + 4 for nic in stack) - 4 for stack in node.stacks)])


def settle(node: Node, x: float, level: int, tops: Mapping[int, float], bottom: float) -> None:
    """Put a node and all below it into their places, the leaves onto the lowest row."""
    node.x = x + (node.span - node.width) / 2
    if str(node.branch.device["kind"]) not in INNER:
        node.y = bottom - node.height
        return
    node.y = tops[level]
    widths = [child.span for child in node.inner] + [leaf.width for leaf in node.leaves]
    widths += [SPINE + stack[0].width for stack in node.stacks]
    at = x + (node.span - sum(widths) - GAP * max(0, len(widths) - 1)) / 2
    for child in node.inner:
        settle(child, at, level + 1, tops, bottom)
        at += child.span + GAP
    for leaf in node.leaves:
        leaf.x, leaf.y = at, bottom - leaf.height
        at += leaf.width + GAP
    for stack in node.stacks:
        y = bottom - sum(nic.height + 4 for nic in stack) + 4
        for nic in stack:
            nic.x, nic.y = at + SPINE, y
            y += nic.height + 4
        at += SPINE + stack[0].width + GAP


def marked(device: Document, host: Document, findings: Sequence[tuple[str, str]]) -> int:
    """Return the number of the finding that speaks of a device, 0 for none; one about many devices marks none."""
    ids = [str(each["id"]) for each in host.get("devices") or []]
    for number, (what, _) in enumerate(findings, 1):
        if names(what, str(device["id"])) and sum(names(what, each) for each in ids) <= FEW:
            return number
    return 0


def names(text: str, id: str) -> bool:
    """Whether a finding speaks of a device."""
    return bool(id) and re.search(rf"(?<![\w/]){re.escape(id)}(?![\w/])", text) is not None
