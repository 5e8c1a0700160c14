"""A series keeps the whole run in bounded memory."""

from __future__ import annotations

from psctl.view.series import Series


def test_a_long_series_keeps_the_whole_run() -> None:
    series = Series(2000)
    for step in range(1, 100_001):
        series.add(step, float(step), step / 2)
    series.add(200_000, 200_000.0, float("nan"))
    assert 1000 <= len(series.steps) <= 2000
    assert series.steps[0] == 1
    assert series.steps[-1] > 99_000
    assert all(value == step / 2 for step, value in zip(series.steps, series.values, strict=True))
    series.cut(50)
    assert series.steps[-1] <= 50
    assert len(series.steps) == len(series.times) == len(series.values)
