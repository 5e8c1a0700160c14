"""A page for SVG: boxes, texts and lines in absolute places, and labels that are put only where there is room.

Nothing foreign is trusted: every text is made one harmless line and escaped. How wide a text is, is estimated for a
wide sans-serif font, for nobody knows the reader's; so what is said to fit does fit. Labels come last: each is put at
the first of its places that touches no box, no line and no other label, else left out, for what it says stands in the
element's title too.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

import msgspec

from psctl.view.text import one_line

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
INK, FAINT, PAPER = "#1d2939", "#667085", "#ffffff"
LINE = 1.35
"""Height of a line of text, in its own size."""

Point = tuple[float, float]


class Area(msgspec.Struct, frozen=True):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Area) -> bool:
        """Whether both cover any point."""
        return (
            self.x < other.x + other.width and other.x < self.x + self.width
            and self.y < other.y + other.height and other.y < self.y + self.height
        )  # fmt: skip


class _Label(msgspec.Struct, frozen=True):
    text: str
    places: tuple[Point, ...]
    size: float
    colour: str


class Canvas:
    """Elements in three layers: grounds, lines, and what stands on them."""

    def __init__(self) -> None:
        self._layers: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._taken: list[Area] = []
        self._labels: list[_Label] = []

    def ground(self, area: Area, fill: str, stroke: str, radius: float = 8) -> None:
        """Put a surface that others stand on."""
        self._layers[0].append(_rect("ground", area, fill, stroke, radius, False))
        for x, width in ((area.x, 2.0), (area.x + area.width, 2.0)):  # no label lies over its edge
            self.keep(Area(x - 1, area.y, width, area.height))

    def box(self, area: Area, fill: str, lines: Sequence[tuple[str, float, bool]], *, dashed: bool, title: str) -> None:
        """Put the box of a device.

        Args:
            area: its place; the lines must fit (`text_width`).
            fill: its colour.
            lines: text, size, bold.
            dashed: it is derived.
            title: what a reader sees who points at it.
        """
        parts = [f'<g class="device"><title>{_escaped(title)}</title>', _rect("box", area, fill, "#475467", 5, dashed)]
        height = sum(size * LINE for _, size, _ in lines)
        y = area.y + (area.height - height) / 2
        for text, size, bold in lines:
            parts.append(_text(area.x + area.width / 2, y + size, text, size, INK, bold, "middle"))
            y += size * LINE
        self._layers[2].append("".join([*parts, "</g>"]))
        self._taken.append(area)

    def text(self, x: float, y: float, text: str, size: float, colour: str = INK, bold: bool = False) -> None:
        """Put a text; `y` is its base line. Nothing else is put over it."""
        self._layers[2].append(_text(x, y, text, size, colour, bold, "start"))
        self.keep(text_area(x, y, text, size, bold))

    def badge(self, x: float, y: float, text: str, fill: str) -> None:
        """Put a small round badge around a point."""
        circle = f'<circle class="badge" cx="{_n(x)}" cy="{_n(y)}" r="7" fill="{fill}" stroke="#ffffff"/>'
        self._layers[2].append(circle + _text(x, y + 3.2, text, 9, "#ffffff", True, "middle"))
        self.keep(Area(x - 7, y - 7, 14, 14))

    def keep(self, area: Area) -> None:
        """Let no label come here."""
        self._taken.append(area)

    def line(
        self, points: Sequence[Point], width: float, colour: str, *, dashed: bool = False, title: str = ""
    ) -> None:
        """Put a line through points, its corners square."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._path(path, width, colour, dashed, title)
        for (ax, ay), (bx, by) in itertools.pairwise(points):
            half = width / 2 + 1
            self.keep(Area(min(ax, bx) - half, min(ay, by) - half, abs(bx - ax) + 2 * half, abs(by - ay) + 2 * half))

    def arc(
        self, a: Point, b: Point, depth: float, width: float, colour: str, *, dashed: bool = False, title: str = ""
    ) -> Point:
        """Put an arc below two points (above them with a depth below 0) and return its middle."""
        reach = depth * 4 / 3
        c, d = (a[0], a[1] + reach), (b[0], b[1] + reach)
        path = f"M{_n(a[0])} {_n(a[1])} C{_n(c[0])} {_n(c[1])} {_n(d[0])} {_n(d[1])} {_n(b[0])} {_n(b[1])}"
        self._path(path, width, colour, dashed, title)
        steps = max(8, int(abs(b[0] - a[0]) / 6))
        for i in range(steps + 1):
            x, y = _bezier(a, c, d, b, i / steps)
            self.keep(Area(x - width / 2 - 2, y - width / 2 - 2, width + 4, width + 4))
        return _bezier(a, c, d, b, 0.5)

    def label(self, text: str, places: Iterable[Point], size: float = 9, colour: str = FAINT) -> None:
        """Want a label at the first of these places (left end of its base line) where there is room."""
        if text:
            self._labels.append(_Label(text, tuple(places), size, colour))

    def _path(self, path: str, width: float, colour: str, dashed: bool, title: str) -> None:
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        style = f'fill="none" stroke="{colour}" stroke-width="{_n(width)}" stroke-linejoin="round"{dash}'
        told = f"<title>{_escaped(title)}</title>" if title else ""
        self._layers[1].append(f'<path class="link" d="{path}" {style}>{told}</path>')

    def _settle(self) -> None:
        for label in self._labels:
            for x, y in label.places:
                area = text_area(x, y, label.text, label.size, False)
                if not any(area.meets(other) for other in self._taken):
                    self._taken.append(area)
                    self._layers[2].append(_text(x, y, label.text, label.size, label.colour, False, "start", "rate"))
                    break
        self._labels = []

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the page as an SVG document of this size in pixels."""
        self._settle()
        size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
        head = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'font-family="{FONT}">\n<title>{_escaped(title)}</title>\n'
        )
        paper = f'<rect class="paper" width="{_n(width)}" height="{_n(height)}" fill="{PAPER}"/>'
        return head + "\n".join([paper, *(line for layer in self._layers for line in layer)]) + "\n</svg>\n"


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return how wide a text is at most, in pixels."""
    return sum(map(_character, one_line(text))) * size * (1.09 if bold else 1.0)


def text_area(x: float, y: float, text: str, size: float, bold: bool) -> Area:
    """Return what a text covers whose base line begins at a point."""
    return Area(x, y - size * 0.8, text_width(text, size, bold), size * 1.05)


def folded(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Split a text into lines that are no wider than this; a word that is wider is cut into parts, nothing is lost."""
    lines = [""]
    for word in one_line(text).split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, size, bold) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and text_width(lines[-1] + character, size, bold) > width:
                lines.append("")
            lines[-1] += character
    return lines


def _character(character: str) -> float:
    if character in "iIjlt.,:;'|!()[]{} /-f\"`":
        return 0.39
    if character in "mwMW@%→▲…&":
        return 0.98
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    return 0.71 if character.isupper() else 0.64


def _bezier(a: Point, b: Point, c: Point, d: Point, t: float) -> Point:
    u = 1 - t
    weights = (u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t)
    points = (a, b, c, d)
    return (
        sum(w * p[0] for w, p in zip(weights, points, strict=True)),
        sum(w * p[1] for w, p in zip(weights, points, strict=True)),
    )


def _rect(kind: str, area: Area, fill: str, stroke: str, radius: float, dashed: bool) -> str:
    place = f'x="{_n(area.x)}" y="{_n(area.y)}" width="{_n(area.width)}" height="{_n(area.height)}" rx="{_n(radius)}"'
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<rect class="{kind}" {place} fill="{fill}" stroke="{stroke}"{dash}/>'


def _text(x: float, y: float, text: str, size: float, colour: str, bold: bool, anchor: str, kind: str = "text") -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour}" text-anchor="{anchor}"{weight}'
    return f"<text class={quoteattr(kind)} {place}>{_escaped(text)}</text>"


def _escaped(text: str) -> str:
    """Return any text fit for XML, which has no place for some characters even when they are escaped."""
    return escape("".join(c for c in one_line(text) if c.isprintable() and ord(c) not in (0xFFFE, 0xFFFF)))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
