"""`topo -o svg`: a picture for reports. Pure: document in, text out; no library, font or script.

On top the network between hosts, below it a panel for each host, then the suggestion with its rings and shares, and a
legend. Thickness is bandwidth on a logarithmic scale from the slowest to the fastest link of the picture, one scale
inside hosts and one between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import CLOSED, OPEN, is_edge, locate_member, ring_steps, rings_of
from psctl.view.drawing_styles import LineWidths, line_widths, link_colour, ring_colour
from psctl.view.pictures.canvas import FAINT, INK, Canvas, fold_text, text_width
from psctl.view.pictures.svg_host import HostPanel
from psctl.view.pictures.svg_layout import LINE_HEIGHT
from psctl.view.pictures.svg_network import LANE, NetworkDrawing
from psctl.view.text import one_line

MARGIN, GAP = 20.0, 18.0

SHAPE = 1.5
"""Width over height that the layout of many hosts aims at."""


def svg(document: Document) -> str:
    """Return the picture of a topology document as the text of an SVG file."""
    pens = line_widths(document)
    hosts = {str(host["name"]): host for host in document.get("hosts") or []}
    network = NetworkDrawing(document, pens)
    rings = _rings(document.get("strategy"), hosts)
    panels = {
        name: HostPanel(host, pens, rings.get(name, []), network.link_texts(name)) for name, host in hosts.items()
    }
    grid = _grid(list(panels), panels, network)
    canvas = Canvas()
    width, bottom = _draw_hosts(canvas, grid, panels, network)
    width = max(width, 520.0)
    bottom = _draw_strategy(canvas, document.get("strategy"), width, bottom + GAP)
    bottom = _draw_legend(canvas, document, pens, width, bottom + 4)
    title = f"Topology of {', '.join(map(one_line, hosts)) or 'nothing'}"
    return canvas.svg(width, bottom + MARGIN, title)


def _rings(strategy: Document | None, hosts: Mapping[str, Document]) -> dict[str, list[tuple[int, str, str]]]:
    """Return, for each host, the steps of rings between two of its devices."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for index, (group, _) in enumerate(rings_of(strategy)):
        for a, b in ring_steps(strategy, group):
            one, other = locate_member(hosts, a), locate_member(hosts, b)
            if one and other and one[0] == other[0]:
                found.setdefault(one[0], []).append((index, one[1], other[1]))
    return found


def _grid(names: Sequence[str], panels: Mapping[str, HostPanel], network: NetworkDrawing) -> list[list[str]]:
    """Return the hosts in columns, as many as bring the picture nearest to SHAPE.

    Hosts of one switch are adjacent.
    """
    names = sorted(names, key=network.rank)
    best: tuple[float, list[list[str]]] = (float("inf"), [])
    for count in range(1, len(names) + 1):
        tall = -(-len(names) // count)
        columns = [list(names[i : i + tall]) for i in range(0, len(names), tall)]
        rows = [[column[i] for column in columns if i < len(column)] for i in range(tall)]
        width = sum(max(panels[name].width for name in column) + _gutter(column, network) for column in columns)
        height = sum(max(panels[name].height for name in row) + GAP for row in rows)
        off = max(width / height / SHAPE, SHAPE * height / width)
        best = min(best, (off, columns), key=lambda each: each[0])
    return best[1]


def _gutter(column: Sequence[str], network: NetworkDrawing) -> float:
    lanes = sum(len(network.lanes(name)) for name in column)
    return GAP + LANE * lanes


def _draw_hosts(
    canvas: Canvas, columns: Sequence[Sequence[str]], panels: Mapping[str, HostPanel], network: NetworkDrawing
) -> tuple[float, float]:
    """Draw the panels and the network; return their right and lower edges."""
    lanes = _lanes(columns, panels, network)
    network.arrange(MARGIN, lanes)
    tops, y = [], MARGIN + network.height
    for row in range(max(map(len, columns), default=0)):
        tops.append(y)
        y += max(panels[column[row]].height for column in columns if row < len(column)) + GAP
    ports: dict[str, list[tuple[float, float]]] = {}
    x = MARGIN - GAP
    for column in columns:
        x += _gutter(column, network)
        for name, top in zip(column, tops, strict=False):
            panels[name].draw(canvas, x, top)
            ports[name] = [(x, top + 22 + 10 * number) for number in range(len(lanes[name]))]
        x += max(panels[name].width for name in column)
    network.draw(canvas, MARGIN, ports)
    return max(x, network.right) + MARGIN, y - GAP


def _lanes(
    columns: Sequence[Sequence[str]], panels: Mapping[str, HostPanel], network: NetworkDrawing
) -> dict[str, list[float]]:
    """Return the x of each host's lanes: left of its column, those of lower hosts further left."""
    lanes: dict[str, list[float]] = {}
    x = MARGIN - GAP
    for column in columns:
        x += _gutter(column, network)
        lane = x - LANE
        for name in column:
            lanes[name] = [lane - LANE * number for number in range(len(network.lanes(name)))]
            lane -= LANE * len(lanes[name])
        x += max(panels[name].width for name in column)
    return lanes


def _draw_strategy(canvas: Canvas, strategy: Document | None, width: float, y: float) -> float:
    """Draw the suggestion: name, reason, and each ring in its colour with its share; return the lower edge."""
    if not strategy:
        return y
    name, space = one_line(strategy["name"]), width - 2 * MARGIN
    y += 14
    canvas.text(MARGIN, y, f"Suggested: {name}", 14, INK, True)
    for line in fold_text(str(strategy.get("reason") or ""), space, 11):
        y += 11 * LINE_HEIGHT + 2
        canvas.text(MARGIN, y, line, 11, FAINT)
    for index, (group, share) in enumerate(rings_of(strategy)):
        colour = ring_colour(index) if name in CLOSED | OPEN else FAINT
        members = [one_line(member) for member in group]
        if name in CLOSED and len(members) > 2:
            members.append(members[0])
        text = " → ".join(members) if name in CLOSED | OPEN else labels.id_ranges(members)
        part = f"{share:.0%}" if share is not None else ""
        y += 11 * LINE_HEIGHT + 5
        canvas.line([(MARGIN, y - 4), (MARGIN + 26, y - 4)], 4, colour)
        canvas.text(MARGIN + 34, y, part, 11, colour, True)
        for number, line in enumerate(fold_text(text, space - 80, 11)):
            y += 11 * LINE_HEIGHT if number else 0
            canvas.text(MARGIN + 76, y, line, 11, INK)
    return y + 8


def _draw_legend(canvas: Canvas, document: Document, pens: LineWidths, width: float, y: float) -> float:
    """Draw a sample of each family and rate of link, and of derived ones; return the lower edge."""
    samples: dict[str, tuple[float, str, bool]] = {}
    for host in document.get("hosts") or []:
        for link in filter(is_edge, host.get("links") or []):
            samples.setdefault(labels.link_text(link), (pens.inside(link), link_colour(link), False))
    for link in document.get("between") or []:
        kind = {"type": "Ethernet", **link}
        samples.setdefault(labels.link_text(kind), (pens.between(kind), link_colour(kind), False))
    entries = [t for host in document.get("hosts") or [] for key in ("devices", "links") for t in host.get(key) or []]
    if any(thing.get("derived") for thing in entries):
        samples["derived: not listed by any tool, inferred from the rest"] = (2.0, FAINT, True)
    if not samples:
        return y
    y, x = y + 14, MARGIN
    canvas.text(x, y, "Each direction, payload; thickness grows with the logarithm of the rate.", 10, FAINT)
    y += 18
    for text, (pen, colour, dashed) in sorted(samples.items(), key=lambda each: (each[1][2], each[1][1], -each[1][0])):
        needed = 34 + text_width(text, 10) + 18
        if x > MARGIN and x + needed > width - MARGIN:
            x, y = MARGIN, y + 17
        canvas.line([(x, y - 3.5), (x + 28, y - 3.5)], pen, colour, dashed=dashed)
        canvas.text(x + 34, y, text, 10, FAINT)
        x += needed
    return y
