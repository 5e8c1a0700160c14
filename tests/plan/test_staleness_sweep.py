"""The sweep over staleness has the shape of the papers: idle falls to a few per cent, total time is least inside."""

from __future__ import annotations

from bench.staleness import sweep


def test_stragglers_that_change_are_hidden_until_late_gradients_cost_more() -> None:
    rows = sweep(persistent=False, seeds=5)
    idle = [row["idle"] for row in rows]
    assert 0.4 < idle[0] < 0.6
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] < 0.05
    times = [row["time"] for row in rows]
    best = times.index(min(times))
    assert 0 < best < len(times) - 1
    assert times[0] > 1.5 * times[best]
    assert times[-1] > 1.1 * times[best]


def test_a_straggler_that_stays_is_waited_for_at_any_staleness() -> None:
    idle = [row["idle"] for row in sweep(persistent=True, seeds=1)]
    assert idle[0] > 0.4
    assert idle[-1] > 0.1
