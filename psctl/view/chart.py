"""A curve of several rows for a terminal: dots of braille characters, values at the left, steps beneath. Pure.

The axes go from one round number to another and change rarely, so that a curve that grows changes few rows of a screen
that is painted by differences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from rich.text import Text

from psctl.view.console import Glyphs
from psctl.view.text import clip, number

LEAST_WIDTH, LEAST_HEIGHT = 30, 5
"""Cells that a chart needs."""

_SCALE = 9  # columns of the values at the left
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character's dots, by column and row."""


def chart(
    title: str, steps: Sequence[int], values: Sequence[float], until: int, width: int, height: int, glyphs: Glyphs,
    *, logarithmic: bool,
) -> list[Text]:  # fmt: skip
    """Return a chart's rows: its title, the curve, and the steps.

    Args:
        title: a line over it.
        steps, values: the points, finite, by step.
        until: the last step of the training; 0: unknown.
        width, height: in cells, at least LEAST_WIDTH and LEAST_HEIGHT.
        glyphs: the characters that the terminal can show.
        logarithmic: the values are drawn on a logarithmic scale if all are above zero.
    """
    logarithmic = logarithmic and min(values, default=0.0) > 0
    low, high = _bounds(values, logarithmic=logarithmic)
    columns, rows = width - _SCALE - 2, height - 2
    across, down = (2, 4) if glyphs.braille else (1, 1)
    last = _end(steps[-1] if steps else 1, until)
    scale = math.log if logarithmic else float
    bottom, span = scale(low), scale(high) - scale(low)

    def place(step: int, value: float) -> tuple[int, int]:
        x = min(columns * across - 1, step * columns * across // (last + 1))
        y = round((rows * down - 1) * (1 - (scale(value) - bottom) / span)) if span > 0 else rows * down // 2
        return x, min(max(y, 0), rows * down - 1)

    points = [place(step, value) for step, value in zip(steps, values, strict=True)]
    cells = _cells(points, columns, rows, across, down)
    labels = {0: number(high), rows - 1: number(low)}
    if rows >= _SCALE // 2 and span > 0:
        middle = (rows - 1) / 2
        at = bottom + span * (1 - round(middle) / (rows - 1))
        labels[round(middle)] = number(math.exp(at) if logarithmic else at)
    drawn = [Text(clip(title, width), no_wrap=True)]
    for row in range(rows):
        line = "".join(_character(cells[row][column], glyphs) for column in range(columns))
        drawn.append(Text.assemble((f"{clip(labels.get(row, ''), _SCALE):>{_SCALE}} ", "dim"), (glyphs.bar, "dim"),
                                   (line, "green")))  # fmt: skip
    end = f"{last:,}"
    drawn.append(Text(f"{'':{_SCALE + 2}}0{end:>{columns - 1}}", style="dim", no_wrap=True))
    return drawn


def _cells(points: Sequence[tuple[int, int]], columns: int, rows: int, across: int, down: int) -> list[list[int]]:
    """Return the bits of each cell: the points, joined by lines."""
    cells = [[0] * columns for _ in range(rows)]

    def mark(x: int, y: int) -> None:
        cells[y // down][x // across] |= _DOTS[x % across][y % down]

    for x, y in points[:1]:
        mark(x, y)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for part in range(length + 1):
            mark(x0 + round((x1 - x0) * part / length), y0 + round((y1 - y0) * part / length))
    return cells


def _character(bits: int, glyphs: Glyphs) -> str:
    if not bits:
        return " "
    return chr(_BRAILLE + bits) if glyphs.braille else "*"


def _end(step: int, until: int) -> int:
    """Return the end of the axis of steps: the next of 10, 20, 50, 100 ... after a step, at most that of training."""
    unit = int(10 ** max(1, len(str(step)) - 1))
    end = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= step)
    return max(step, min(end, until)) if until else end


def _bounds(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float]:
    """Return round numbers below and above all values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if not logarithmic:
        low = min(low, 0.0)
    if low == high:
        return low, high
    return _rounded(low, math.floor), _rounded(high, math.ceil)


def _rounded(value: float, towards: Callable[[float], int]) -> float:
    """Return a value with two significant digits, rounded by floor or ceil."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return float(towards(value / unit) * unit)
