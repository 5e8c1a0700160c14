"""`topo -o svg`: a picture that one can put in a report. Pure: document in, text out; no library, no font, no script.

On top what lies between the hosts, below it a panel for each host, below these the suggestion with its rings in their
colours and shares, and what thickness and colours mean. Thickness is bandwidth on a logarithmic scale from the slowest
to the fastest link of the picture, one scale inside hosts and one between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psctl.view import labels
from psctl.view.canvas import FAINT, INK, Canvas, folded, text_width
from psctl.view.inside import CLOSED, OPEN, is_edge, place, rings_of, steps
from psctl.view.paint import RINGS, Pens, colour_of, widths_of
from psctl.view.svg_host import Panel
from psctl.view.svg_net import LANE, Network
from psctl.view.svg_tree import LINE_HEIGHT
from psctl.view.text import one_line

Document = Mapping[str, Any]

MARGIN, GAP = 20.0, 18.0

SHAPE = 1.5
"""Width over height that a picture of many hosts comes near to."""


def svg(document: Document) -> str:
    """Return the picture of a topology document as the text of an SVG file."""
    pens = widths_of(document)
    hosts = {str(host["name"]): host for host in document.get("hosts") or []}
    network = Network(document, pens)
    rings = _rings(document.get("strategy"), hosts)
    panels = {name: Panel(host, pens, rings.get(name, []), network.words(name)) for name, host in hosts.items()}
    grid = _grid(list(panels), panels, network)
    canvas = Canvas()
    width, bottom = _draw_hosts(canvas, grid, panels, network)
    width = max(width, 520.0)
    bottom = _draw_strategy(canvas, document.get("strategy"), width, bottom + GAP)
    bottom = _draw_legend(canvas, document, pens, width, bottom + 4)
    title = f"Topology of {', '.join(map(labels.named, hosts)) or 'nothing'}"
    return canvas.svg(width, bottom + MARGIN, title)


def _rings(strategy: Document | None, hosts: Mapping[str, Document]) -> dict[str, list[tuple[int, str, str]]]:
    """Return, for each host, the steps of rings between two of its devices."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for index, (group, _) in enumerate(rings_of(strategy)):
        for a, b in steps(strategy, group):
            one, other = place(hosts, a), place(hosts, b)
            if one and other and one[0] == other[0]:
                found.setdefault(one[0], []).append((index, one[1], other[1]))
    return found


def _grid(names: Sequence[str], panels: Mapping[str, Panel], network: Network) -> list[list[str]]:
    """Return the names in columns, filled one after another, so many that the picture comes near to its shape.

    Hosts of one switch stand next to each other.
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


def _gutter(column: Sequence[str], network: Network) -> float:
    lanes = sum(len(network.lanes(name)) for name in column)
    return GAP + LANE * lanes


def _draw_hosts(
    canvas: Canvas, columns: Sequence[Sequence[str]], panels: Mapping[str, Panel], network: Network
) -> tuple[float, float]:
    """Draw the panels and what lies between them; return where they end to the right and below."""
    lanes = _lanes(columns, panels, network)
    network.arrange(MARGIN, lanes)
    tops, y = [], MARGIN + network.height
    for row in range(max(map(len, columns), default=0)):
        tops.append(y)
        y += max(panels[column[row]].height for column in columns if row < len(column)) + GAP
    doors: dict[str, list[tuple[float, float]]] = {}
    x = MARGIN - GAP
    for column in columns:
        x += _gutter(column, network)
        for name, top in zip(column, tops, strict=False):
            panels[name].draw(canvas, x, top)
            doors[name] = [(x, top + 22 + 10 * number) for number in range(len(lanes[name]))]
        x += max(panels[name].width for name in column)
    network.draw(canvas, MARGIN, doors)
    return max(x, network.right) + MARGIN, y - GAP


def _lanes(columns: Sequence[Sequence[str]], panels: Mapping[str, Panel], network: Network) -> dict[str, list[float]]:
    """Return where the lanes of each host run: left of its column, those of deeper hosts further out."""
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
    """Draw the suggestion: its name, its reason, each ring in its colour with its share."""
    if not strategy:
        return y
    name, room = one_line(str(strategy["name"])), width - 2 * MARGIN
    y += 14
    canvas.text(MARGIN, y, f"Suggested: {name}", 14, INK, True)
    for line in folded(str(strategy.get("reason") or ""), room, 11):
        y += 11 * LINE_HEIGHT + 2
        canvas.text(MARGIN, y, line, 11, FAINT)
    for index, (group, share) in enumerate(rings_of(strategy)):
        colour = RINGS[index % len(RINGS)] if name in CLOSED | OPEN else FAINT
        members = [labels.named(member) for member in group]
        if name in CLOSED and len(members) > 2:
            members.append(members[0])
        words = " → ".join(members) if name in CLOSED | OPEN else labels.ranges(members)
        part = f"{share:.0%}" if share is not None else ""
        y += 11 * LINE_HEIGHT + 5
        canvas.line([(MARGIN, y - 4), (MARGIN + 26, y - 4)], 4, colour)
        canvas.text(MARGIN + 34, y, part, 11, colour, True)
        for number, line in enumerate(folded(words, room - 80, 11)):
            y += 11 * LINE_HEIGHT if number else 0
            canvas.text(MARGIN + 76, y, line, 11, INK)
    return y + 8


def _draw_legend(canvas: Canvas, document: Document, pens: Pens, width: float, y: float) -> float:
    """Say what lines mean: one sample for each sort of cable and rate that occurs, and what is dashed."""
    samples: dict[str, tuple[float, str, bool]] = {}
    for host in document.get("hosts") or []:
        for link in filter(is_edge, host.get("links") or []):
            samples.setdefault(labels.cable(link), (pens.inside(link), colour_of(link), False))
    for link in document.get("between") or []:
        kind = {"type": "Ethernet", **link}
        samples.setdefault(labels.cable(kind), (pens.between(kind), colour_of(kind), False))
    things = [t for host in document.get("hosts") or [] for key in ("devices", "links") for t in host.get(key) or []]
    if any(thing.get("derived") for thing in things):
        samples["derived: nothing lists it, it follows from what was said"] = (2.0, FAINT, True)
    if not samples:
        return y
    y, x = y + 14, MARGIN
    canvas.text(x, y, "Each direction, payload; thickness grows with the logarithm of the rate.", 10, FAINT)
    y += 18
    for words, (pen, colour, dashed) in sorted(samples.items(), key=lambda each: (each[1][2], each[1][1], -each[1][0])):
        needed = 34 + text_width(words, 10) + 18
        if x > MARGIN and x + needed > width - MARGIN:
            x, y = MARGIN, y + 17
        canvas.line([(x, y - 3.5), (x + 28, y - 3.5)], pen, colour, dashed=dashed)
        canvas.text(x + 34, y, words, 10, FAINT)
        x += needed
    return y
