"""The layout of a host's device tree: the size and position of each box.

A device is as wide as its text or as its children. GPUs and NICs share the lowest row, whatever their parent, so that
links below it can reach them; NICs of one parent are stacked at the right of its GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set

import msgspec

from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import INNER, DeviceNode
from psctl.view.pictures.canvas import Area, fold_text, text_width
from psctl.view.text import one_line

LINE_HEIGHT = 1.35
"""Height of a line of text, in its font size."""

PAD, GAP, LEVEL = 12.0, 10.0, 34.0
"""Pixels: margin in a panel, gap between boxes of a row, gap between rows."""

STACK = 4
"""Most NICs in a stack."""

SPINE = 12.0
"""Pixels at the left of a stack for its line."""

DROP = 10.0
"""Pixels from the left of a GPU's box to its line, so that the rate fits between the line and the next box."""

NARROW = 66.0
"""Least width of a box in pixels."""


class BoxNode(msgspec.Struct):
    """A device and its position in the panel, with the devices below it."""

    branch: DeviceNode
    lines: list[tuple[str, float, bool]]
    width: float
    height: float
    span: float = 0.0
    inner: list[BoxNode] = []
    leaves: list[BoxNode] = []
    stacks: list[list[BoxNode]] = []
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        """The horizontal middle of its box."""
        return self.x + self.width / 2

    @property
    def area(self) -> Area:
        """Its box."""
        return Area(self.x, self.y, self.width, self.height)

    @property
    def below_width(self) -> float:
        """The width of the row of its children, with the gaps between them."""
        widths = [child.span for child in self.inner] + [leaf.width for leaf in self.leaves]
        widths += [SPINE + stack[0].width for stack in self.stacks]
        return sum(widths) + GAP * max(0, len(widths) - 1)

    def all(self) -> list[BoxNode]:
        """Return this node and all below it."""
        children = [*self.inner, *self.leaves, *(nic for stack in self.stacks for nic in stack)]
        return [self, *(node for child in children for node in child.all())]


FEW = 2
"""A finding that names more devices than this marks none of their boxes."""


class BoxContents(msgspec.Struct, frozen=True):
    """Properties of a host that determine the text of its boxes.

    `same` are the kinds of which all devices have one name, `few` whether there are few NICs, `marks` the numbers of
    findings by the id of the device that has their badge.
    """

    same: Set[str]
    few: bool
    marks: Mapping[str, int]


def make_node(branch: DeviceNode, contents: BoxContents) -> BoxNode:
    """Return the nodes of a device and of all below it, each with its text and the width of that."""
    device = branch.device
    kind = str(device["kind"])
    lines = [(one_line(device["id"]), 12.0 if kind != "nic" else 11.0, True)]
    details = labels.device_details(device)
    if kind in contents.same:
        details = [detail for detail in details if detail != one_line(device.get("name") or "")]
    if kind == "nic" and not contents.few:
        details = details[-1:] if device.get("bandwidth") else []
        details = [detail.removeprefix("port ") for detail in details]
    if kind == "switch" and len(details) == 1 and not device.get("name"):
        details = []
    lines += [(part, 9.5, False) for detail in details for part in fold_text(detail, 150, 9.5)]
    width = max(text_width(text, size, bold) for text, size, bold in lines) + 14
    if str(device["id"]) in contents.marks:
        width += 22  # for the badge
    height = sum(size * LINE_HEIGHT for _, size, _ in lines) + 8
    node = BoxNode(branch, lines, max(width, NARROW), height)
    nics = []
    for below in branch.below:
        child = make_node(below, contents)
        if str(below.device["kind"]) in INNER:
            node.inner.append(child)
        elif below.device["kind"] == "nic":
            nics.append(child)
        else:
            node.leaves.append(child)
    rows = math.ceil(len(nics) / math.ceil(len(nics) / STACK)) if nics else 1
    node.stacks = [nics[i : i + rows] for i in range(0, len(nics), rows)]
    return node


def set_spans(node: BoxNode) -> None:
    """Set the width of a node with all below it; a processor's box is as wide as its children."""
    for child in node.inner:
        set_spans(child)
    cpu = node.branch.device["kind"] == "cpu"
    pad = 2 * GAP if cpu and node.branch.below else 0.0
    node.span = max(node.width, node.below_width) + pad
    if cpu:
        node.width = node.span - pad


def collect_heights(node: BoxNode, level: int, found: dict[int, float]) -> None:
    """Set in `found` the height of the row of inner devices at each level."""
    if str(node.branch.device["kind"]) in INNER:
        found[level] = max(found.get(level, 0.0), node.height)
        for child in node.inner:
            collect_heights(child, level + 1, found)


def row_height(node: BoxNode) -> float:
    """Return the height of a node's leaves and stacks."""
    leaves = [leaf.height for leaf in node.leaves]
    return max([0.0, *leaves, *(sum(nic.height + 4 for nic in stack) - 4 for stack in node.stacks)])


def set_positions(node: BoxNode, x: float, level: int, tops: Mapping[int, float], bottom: float) -> None:
    """Set the positions of a node and of all below it, the leaves on the lowest row."""
    node.x = x + (node.span - node.width) / 2
    if str(node.branch.device["kind"]) not in INNER:
        node.y = bottom - node.height
        return
    node.y = tops[level]
    at = x + (node.span - node.below_width) / 2
    for child in node.inner:
        set_positions(child, at, level + 1, tops, bottom)
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


def finding_marks(host: Document, findings: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the number of the first finding that names a device, by the device's id.

    A finding that names more than FEW devices marks none.
    """
    ids = [str(each["id"]) for each in host.get("devices") or []]
    marks: dict[str, int] = {}
    for number, (what, _) in enumerate(findings, 1):
        named = [id_ for id_ in ids if id_ and re.search(rf"(?<![\w/]){re.escape(id_)}(?![\w/])", what)]
        if len(named) <= FEW:
            marks = {**dict.fromkeys(named, number), **marks}
    return marks
