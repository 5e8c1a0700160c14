"""Colours and widths of drawings: by kind of device, by type of cable, by bandwidth. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from psctl.view import labels
from psctl.view.inside import is_edge

Document = Mapping[str, Any]

KINDS = {"cpu": "#e4e7ec", "gpu": "#d3f2d9", "nic": "#d6e9fb", "switch": "#fdeed2"}
"""Of the boxes of devices."""

CABLES = {
    "PCIe": "#667085", "NVLink": "#4b8b3b", "xGMI": "#b54708", "SMP": "#8a6d3b", "Ethernet": "#2e6fb7",
    "InfiniBand": "#6941c6",
}  # fmt: skip
"""Of edges; a type that is not here is grey."""

RINGS = ("#d92d20", "#1570ef", "#f79009", "#7a5af8", "#099250", "#c11574", "#0e9384", "#53389e")
"""Of rings, by turns; told apart by most eyes, and in grey by their order in the legend."""

THIN, THICK, ALIKE = 1.2, 7.0, 2.5
"""Widths of the slowest and of the fastest edge, and of all when they are equally fast."""


RANGE = 4.0
"""The thinnest line is for an edge this much slower than the fastest, or for a slower one: near rates look near."""


class Pens(msgspec.Struct, frozen=True):
    """Widths by bandwidth: one scale inside hosts, one between them, each from its slowest to its fastest edge."""

    within: tuple[float, float]
    network: tuple[float, float]

    def inside(self, link: Document) -> float:
        """Return the width of an edge inside a host."""
        return _width(link.get("bandwidth"), *self.within)

    def between(self, link: Document) -> float:
        """Return the width of an edge between hosts."""
        return _width(link.get("bandwidth"), *self.network)


def widths_of(document: Document) -> Pens:
    """Return the scales that suit a document."""
    inner = (
        link["bandwidth"] for host in document.get("hosts") or [] for link in host.get("links") or []
        if is_edge(link) and link.get("bandwidth")
    )  # fmt: skip
    outer = (link["bandwidth"] for link in document.get("between") or [] if link.get("bandwidth"))
    return Pens(_span(inner), _span(outer))


def _span(bandwidths: Iterable[float]) -> tuple[float, float]:
    found = [float(bandwidth) for bandwidth in bandwidths]
    if not found or max(found) < min(found) * 1.01:
        return (found or [1.0])[0], (found or [1.0])[0]
    return min(*found, max(found) / RANGE), max(found)


def _width(bandwidth: object, low: float, high: float) -> float:
    if not isinstance(bandwidth, int | float) or bandwidth <= 0:
        return THIN
    if high < low * 1.01:
        return ALIKE
    part = math.log(bandwidth / low) / math.log(high / low)
    return THIN + (THICK - THIN) * min(1.0, max(0.0, part))


def colour_of(link: Document) -> str:
    """Return the colour of an edge's type."""
    return CABLES.get(labels.kind_of(link), "#667085")
