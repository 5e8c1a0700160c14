"""A chart of a terminal: its size, its axes, and that a growing curve changes few rows."""

from __future__ import annotations

import io
import itertools
import math

import pytest
from rich.console import Console

from psctl.view.chart import LEAST_HEIGHT, LEAST_WIDTH, chart
from psctl.view.console import Glyphs


def glyphs(encoding: str = "utf-8") -> Glyphs:
    return Glyphs(Console(file=io.TextIOWrapper(io.BytesIO(), encoding)))


def drawn(values: list[float], width: int, height: int, until: int = 0, *, log: bool = False, encoding: str = "utf-8"):
    steps = list(range(1, len(values) + 1))
    rows = chart("loss", steps, values, until, width, height, glyphs(encoding), logarithmic=log)
    return [row.plain for row in rows]


@pytest.mark.parametrize(
    "values", [[], [1.0], [2.0, 2.0], [0.0, -3.0, 5.0], [1e-300, 1e300], [1e-9, 1.0]], ids=lambda v: str(v)
)
@pytest.mark.parametrize(("width", "height"), [(LEAST_WIDTH, LEAST_HEIGHT), (99, 14)])
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_has_its_size_whatever_the_values(values, width, height, log):
    rows = drawn(values, width, height, log=log)
    assert len(rows) == height
    assert all(len(row) <= width for row in rows)


def test_the_curve_falls_from_the_upper_left_to_the_lower_right():
    rows = drawn([10.0, 8.0, 6.0, 4.0, 2.0, 0.0], 40, 8, encoding="ascii")
    curve = [row.split("|")[1] for row in rows[1:-1]]
    firsts = [line.index("*") for line in curve]
    assert firsts == sorted(firsts) and firsts[0] < 8 and curve[-1].rstrip().endswith("*")
    assert rows[1].split("|")[0].strip() == "10" and rows[-2].split("|")[0].strip() == "0"


def test_a_loss_that_falls_exponentially_is_a_line_on_the_log_scale():
    values = [math.exp(-step / 20) for step in range(100)]
    rows = drawn(values, 80, 12, log=True, encoding="ascii")
    curve = [row.split("|")[1] for row in rows[1:-1]]
    middles = [(line.index("*") + line.rindex("*")) / 2 for line in curve if "*" in line]
    gaps = [b - a for a, b in itertools.pairwise(middles)]
    assert max(gaps) - min(gaps) <= 4, middles


def test_a_growing_curve_changes_few_rows_where_the_end_is_known():
    values = [3 * math.exp(-step / 100) + 1 for step in range(300)]
    changed = 0
    before = drawn(values[:200], 99, 14, until=1000, log=True)
    for count in range(201, 300):
        after = drawn(values[:count], 99, 14, until=1000, log=True)
        changed += sum(old != new for old, new in zip(before, after, strict=True))
        before = after
    assert changed < 100, "less than a row a step"
