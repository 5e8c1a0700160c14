"""An SVG page: boxes, texts and lines at absolute positions, and labels that are drawn only where there is space.

Every text is made one harmless line and escaped. Widths of text are estimated for a wide sans-serif font, because the
reader's font is unknown. Labels are placed last: each at the first of its positions that touches no box, line or other
label, else it is omitted; the element's title has the same text.
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
    """Elements in three layers: surfaces, lines, and boxes with text."""

    def __init__(self) -> None:
        self._layers: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._taken: list[Area] = []
        self._labels: list[_Label] = []

    def ground(self, area: Area, fill: str, stroke: str, radius: float = 8) -> None:
        """Draw a surface below other elements."""
        self._layers[0].append(_rect("ground", area, fill, stroke, radius, False))
        for x, width in ((area.x, 2.0), (area.x + area.width, 2.0)):  # no label covers its edge
            self.reserve(Area(x - 1, area.y, width, area.height))

    def box(self, area: Area, fill: str, lines: Sequence[tuple[str, float, bool]], *, dashed: bool, title: str) -> None:
        """Draw the box of a device.

        Args:
            area: its position and size; the lines must fit (`text_width`).
            fill: its colour.
            lines: text, size, bold.
            dashed: whether it is derived.
            title: the text shown when the pointer is over it.
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
        """Draw a text with its base line at `y`; no label covers it."""
        self._layers[2].append(_text(x, y, text, size, colour, bold, "start"))
        self.reserve(text_area(x, y, text, size, bold))

    def badge(self, x: float, y: float, text: str, fill: str) -> None:
        """Draw a small round badge around a point."""
        circle = f'<circle class="badge" cx="{_n(x)}" cy="{_n(y)}" r="7" fill="{fill}" stroke="#ffffff"/>'
        self._layers[2].append(circle + _text(x, y + 3.2, text, 9, "#ffffff", True, "middle"))
        self.reserve(Area(x - 7, y - 7, 14, 14))

    def reserve(self, area: Area) -> None:
        """Keep labels out of an area."""
        self._taken.append(area)

    def line(
        self, points: Sequence[Point], width: float, colour: str, *, dashed: bool = False, title: str = ""
    ) -> None:
        """Draw a line through points."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._path(path, width, colour, dashed, title)
        for (ax, ay), (bx, by) in itertools.pairwise(points):
            half = width / 2 + 1
            self.reserve(Area(min(ax, bx) - half, min(ay, by) - half, abs(bx - ax) + 2 * half, abs(by - ay) + 2 * half))

    def arc(
        self, a: Point, b: Point, depth: float, width: float, colour: str, *, dashed: bool = False, title: str = ""
    ) -> Point:
        """Draw an arc below two points (above them with a negative depth) and return its middle."""
        reach = depth * 4 / 3
        c, d = (a[0], a[1] + reach), (b[0], b[1] + reach)
        path = f"M{_n(a[0])} {_n(a[1])} C{_n(c[0])} {_n(c[1])} {_n(d[0])} {_n(d[1])} {_n(b[0])} {_n(b[1])}"
        self._path(path, width, colour, dashed, title)
        steps = max(8, int(abs(b[0] - a[0]) / 6))
        for i in range(steps + 1):
            x, y = _bezier(a, c, d, b, i / steps)
            self.reserve(Area(x - width / 2 - 2, y - width / 2 - 2, width + 4, width + 4))
        return _bezier(a, c, d, b, 0.5)

    def label(self, text: str, places: Iterable[Point], size: float = 9, colour: str = FAINT) -> None:
        """Add a label, drawn at the first of these positions (left end of its base line) where there is space."""
        if text:
            self._labels.append(_Label(text, tuple(places), size, colour))

    def _path(self, path: str, width: float, colour: str, dashed: bool, title: str) -> None:
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        style = f'fill="none" stroke="{colour}" stroke-width="{_n(width)}" stroke-linejoin="round"{dash}'
        title_tag = f"<title>{_escaped(title)}</title>" if title else ""
        self._layers[1].append(f'<path class="link" d="{path}" {style}>{title_tag}</path>')

    def _draw_labels(self) -> None:
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
        self._draw_labels()
        size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
        head = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'font-family="{FONT}">\n<title>{_escaped(title)}</title>\n'
        )
        paper = f'<rect class="paper" width="{_n(width)}" height="{_n(height)}" fill="{PAPER}"/>'
        return head + "\n".join([paper, *(line for layer in self._layers for line in layer)]) + "\n</svg>\n"


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return an upper bound of the width of a text, in pixels."""
    return sum(map(_character_width, one_line(text))) * size * (1.09 if bold else 1.0)


def text_area(x: float, y: float, text: str, size: float, bold: bool) -> Area:
    """Return the area of a text whose base line begins at a point."""
    return Area(x, y - size * 0.8, text_width(text, size, bold), size * 1.05)


def fold_text(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Split a text into lines no wider than `width`; a wider word is split too, nothing is lost."""
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


def _character_width(character: str) -> float:
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
    """Return a text escaped for XML, without the characters that XML forbids even when escaped."""
    return escape("".join(c for c in one_line(text) if c.isprintable() and ord(c) not in (0xFFFE, 0xFFFF)))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
