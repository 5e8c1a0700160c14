"""Colours and line widths of drawings: by kind of device, type of link, bandwidth and ring. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import is_edge

DEVICE_COLOURS = {"cpu": "#e4e7ec", "gpu": "#d3f2d9", "nic": "#d6e9fb", "switch": "#fdeed2"}
"""Colours of boxes, by kind of device."""

LINK_COLOURS = {
    "PCIe": "#667085", "NVLink": "#4b8b3b", "xGMI": "#b54708", "SMP": "#8a6d3b", "Ethernet": "#2e6fb7",
    "InfiniBand": "#6941c6",
}  # fmt: skip
"""Colours of links, by family; others are grey."""

RING_COLOURS = ("#d92d20", "#1570ef", "#f79009", "#7a5af8", "#099250", "#c11574", "#0e9384", "#53389e")
"""Colours of rings, in turn; they are distinguishable for most readers, in grey by their order in the legend."""

THIN, THICK, ALIKE = 1.2, 7.0, 2.5
"""Widths of the slowest link, of the fastest, and of all when they are equally fast."""

RANGE = 4.0
"""A link slower than the fastest by this factor or more gets the thinnest line, so that similar rates look similar."""


class LineWidths(msgspec.Struct, frozen=True):
    """Line widths by bandwidth: one scale inside hosts and one between them, from the slowest to the fastest link."""

    inside_range: tuple[float, float]
    network_range: tuple[float, float]

    def inside(self, link: Document) -> float:
        """Return the width of a link inside a host."""
        return _width(link.get("bandwidth"), *self.inside_range)

    def between(self, link: Document) -> float:
        """Return the width of a link between hosts."""
        return _width(link.get("bandwidth"), *self.network_range)


def line_widths(document: Document) -> LineWidths:
    """Return the widths for a topology document."""
    inner = (
        link["bandwidth"] for host in document.get("hosts") or [] for link in host.get("links") or []
        if is_edge(link) and link.get("bandwidth")
    )  # fmt: skip
    outer = (link["bandwidth"] for link in document.get("between") or [] if link.get("bandwidth"))
    return LineWidths(_span(inner), _span(outer))


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


def link_colour(link: Document) -> str:
    """Return the colour of a link's family."""
    return LINK_COLOURS.get(labels.link_family(link), "#667085")


def ring_colour(index: int) -> str:
    """Return the colour of a ring by its number."""
    return RING_COLOURS[index % len(RING_COLOURS)]
