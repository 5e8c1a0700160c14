"""The network between hosts, above their panels: a bar for each network switch, a line for each cable.

Hosts stand in columns. Left of each column is a gutter with a lane for each cable of its hosts: a lane comes down from
its bar, and turns into its host at the height of the host's name; deeper hosts have the outer lanes, so lanes of one
gutter never cross. A cable between two hosts is a track of its own below the bars; where there are too many of these to
be followed by eye, only the text in the hosts' heads has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.types import Document
from psctl.view import labels
from psctl.view.drawing_styles import DEVICE_COLOURS, LineWidths, link_colour
from psctl.view.pictures.canvas import INK, Area, Canvas, text_width
from psctl.view.text import one_line

LANE, TRACK_HEIGHT, BAR = 11.0, 22.0, 24.0
"""Pixels: between lanes, between tracks, height of a bar."""

FOLLOWED = 12
"""Cables from host to host that an eye can follow; more of them are not drawn."""


class NetworkDrawing:
    """The layout of the network between hosts.

    Args:
        document: as `topo -o json` prints it.
        pens: the widths of lines in this picture.
    """

    def __init__(self, document: Document, pens: LineWidths) -> None:
        self.pens = pens
        self.hosts = [str(host["name"]) for host in document.get("hosts") or []]
        known = set(self.hosts)
        links = [{"type": "Ethernet", **link} for link in document.get("between") or []]
        self.direct = [x for x in links if str(x["a"]) in known and str(x["b"]) in known]
        self.spokes = [x for x in links if (str(x["a"]) in known) != (str(x["b"]) in known)]
        self.trunks = [x for x in links if str(x["a"]) not in known and str(x["b"]) not in known]
        self.drawn = self.direct if len(self.direct) <= FOLLOWED else []
        self.levels = self._levels()
        self.lane_of: dict[tuple[int, str], float] = {}
        self.bars: dict[str, Area] = {}
        self.height = self.right = 0.0

    def _levels(self) -> dict[str, int]:
        """Return the distance of each switch to the nearest host, in links less one."""
        levels = {self._ends(link)[1]: 0 for link in self.spokes}
        for _ in self.trunks:
            for link in self.trunks:
                a, b = str(link["a"]), str(link["b"])
                for one, other in ((a, b), (b, a)):
                    if one in levels and other not in levels:
                        levels[other] = levels[one] + 1
        for link in self.trunks:  # a network without any host
            levels.setdefault(str(link["a"]), 0)
            levels.setdefault(str(link["b"]), 0)
        return levels

    def _ends(self, link: Document) -> tuple[str, str]:
        """Return the host and the switch of a link."""
        a, b = str(link["a"]), str(link["b"])
        return (a, b) if a in self.hosts else (b, a)

    def link_texts(self, host: str) -> list[str]:
        """Return a line of text for each link of a host."""
        lines = []
        for link in [*self.spokes, *self.direct]:
            ends = (str(link["a"]), str(link["b"]))
            if host in ends:
                other = ends[1] if ends[0] == host else ends[0]
                via = f"via {one_line(link['via'])}" if link.get("via") and ends[0] == host else ""
                rate = labels.format_link_rate(link.get("bandwidth"), str(link["type"])) or "rate not known"
                parts = (
                    f"to {one_line(other)}",
                    via,
                    rate,
                    labels.format_latency(link),
                    labels.rate_source(link),
                )
                lines.append(" · ".join(part for part in parts if part))
        return lines

    def lanes(self, host: str) -> list[Document]:
        """Return the links of a host that are drawn; each needs a lane."""
        return [link for link in [*self.spokes, *self.drawn] if host in (str(link["a"]), str(link["b"]))]

    def rank(self, host: str) -> int:
        """Return the index of a host's switch; hosts of one switch have the same."""
        names = list(dict.fromkeys(self._ends(link)[1] for link in self.spokes))
        return min((names.index(self._ends(x)[1]) for x in self.spokes if self._ends(x)[0] == host), default=len(names))

    def arrange(self, left: float, lanes: Mapping[str, Sequence[float]]) -> None:
        """Place bars above their lanes, in several rows where they would overlap; set `height` and `right`.

        Args:
            left: x of the first bar.
            lanes: x of each lane of each host, in the order of `lanes()`.
        """
        for host, places in lanes.items():
            for link, x in zip(self.lanes(host), places, strict=True):
                self.lane_of[id(link), host] = x
        rows: list[list[tuple[str, float, float]]] = []
        for level in sorted(set(self.levels.values()), reverse=True):
            rows += self._rows([name for name, found in self.levels.items() if found == level], left)
        y = len(self.trunks) * TRACK_HEIGHT
        for row in rows:
            for name, x, width in row:
                self.bars[name] = Area(x, y, width, BAR)
                self.right = max(self.right, x + width)
            y += BAR + 30
        self.height = y + len(self.drawn) * TRACK_HEIGHT + (14 if self.drawn else 0)

    def _rows(self, names: Sequence[str], left: float) -> list[list[tuple[str, float, float]]]:
        """Return name, x and width of bars in rows within which none overlap."""
        rows: list[list[tuple[str, float, float]]] = []
        spans = {name: self._span(name) or (left, left) for name in names}
        for name in sorted(names, key=lambda name: spans[name]):
            x = max(left, spans[name][0] - 14)
            width = max(spans[name][1] + 14 - x, text_width(name, 11, True) + 24)
            row = next((row for row in rows if row[-1][1] + row[-1][2] + 10 <= x), None)
            if row is None:
                rows.append(row := [])
            row.append((name, x, width))
        return rows

    def _span(self, name: str) -> tuple[float, float] | None:
        """Return the first and last x of a switch's lanes."""
        lanes = [self.lane_of[id(x), self._ends(x)[0]] for x in self.spokes if self._ends(x)[1] == name]
        return (min(lanes), max(lanes)) if lanes else None

    def draw(self, canvas: Canvas, top: float, ports: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        """Draw the switches and the links.

        Args:
            canvas: the page.
            top: y of its upper edge.
            ports: for each host and each of its lanes: the point of the panel's edge at which it ends.
        """
        ends: dict[tuple[int, str], tuple[float, float, float]] = {}
        for host, places in ports.items():
            for link, (x, y) in zip(self.lanes(host), places, strict=True):
                ends[id(link), host] = self.lane_of[id(link), host], x, y
        for name, at in self.bars.items():
            self.bars[name] = bar = Area(at.x, at.y + top, at.width, at.height)
            canvas.box(
                bar,
                DEVICE_COLOURS["switch"],
                [(one_line(name), 11, True)],
                dashed=False,
                title=one_line(name),
            )
        for link in self.spokes:
            host, switch = self._ends(link)
            self._lane(canvas, link, ends[id(link), host], self.bars[switch].y + BAR)
        track = top + self.height - 14 - len(self.drawn) * TRACK_HEIGHT + TRACK_HEIGHT / 2
        for link in self.drawn:
            self._track(canvas, link, ends[id(link), str(link["a"])], ends[id(link), str(link["b"])], track)
            track += TRACK_HEIGHT
        self._draw_trunks(canvas, top)

    def _track(
        self, canvas: Canvas, link: Document, a: tuple[float, float, float], b: tuple[float, float, float], y: float
    ) -> None:
        points = [(a[1], a[2]), (a[0], a[2]), (a[0], y), (b[0], y), (b[0], b[2]), (b[1], b[2])]
        canvas.line(points, self.pens.between(link), link_colour(link), title=_title(link))
        text, x = _carried(link), min(a[0], b[0]) + 10
        canvas.label(text, [(x, y - 6), (x, y + 13), (max(a[0], b[0]) - text_width(text, 9) - 10, y - 6)])

    def _lane(self, canvas: Canvas, link: Document, place: tuple[float, float, float], start: float) -> None:
        lane, x, y = place
        canvas.line([(lane, start), (lane, y), (x, y)], self.pens.between(link), link_colour(link), title=_title(link))
        canvas.label(labels.format_link_rate(link.get("bandwidth"), str(link["type"])), [(lane + 8, start + 15)])

    def _draw_trunks(self, canvas: Canvas, top: float) -> None:
        for index, link in enumerate(self.trunks):
            a, b = sorted((self.bars[str(link["a"])], self.bars[str(link["b"])]), key=lambda bar: bar.x)
            y = top + index * TRACK_HEIGHT + TRACK_HEIGHT / 2
            shift = 6.0 * (index % 5)
            xs = a.x + a.width / 2 + shift, b.x + b.width / 2 + shift
            xs = xs if abs(xs[0] - xs[1]) > 8 else (a.x + 8 + shift, b.x + b.width - 8 - shift)
            points = [(xs[0], a.y), (xs[0], y), (xs[1], y), (xs[1], b.y)]
            canvas.line(points, self.pens.between(link), link_colour(link), title=_title(link))
            text = _carried(link)
            canvas.label(text, [(min(xs) + 10, y - self.pens.between(link) / 2 - 4)], colour=INK)


def _carried(link: Document) -> str:
    parts = (
        labels.format_link_rate(link.get("bandwidth"), str(link["type"])),
        labels.format_latency(link),
        labels.rate_source(link),
    )
    return ", ".join(part for part in parts if part)


def _title(link: Document) -> str:
    return f"{one_line(link['a'])} - {one_line(link['b'])}: {one_line(link['type'])}, {_carried(link)}"
