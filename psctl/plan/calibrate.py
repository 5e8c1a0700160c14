"""Costs of messages on a network and its machines, fitted to the measurements of `bench`.

Predictions depend on `Costs`: alpha that a message waits, overhead of its processor, gamma of a reduced byte. Along a
critical path a prediction is linear in each of them, so a fit linearises it at the current costs (finite differences),
solves the least squares with no cost below zero, and repeats (Gauss-Newton). Errors are relative to the measurement, so
that 10% of a millisecond weigh as much as 10% of a second, and outliers count less (Huber 1964).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from psctl.message_costs import Costs

SCALES = (1e-4, 1e-4, 1e-9)
"""Usual sizes of alpha, overhead (seconds) and gamma (seconds a byte): a step of the differences is a part of these."""

NEAR = 0.1
"""Relative error up to which a measurement counts in full."""

PRIOR = 0.01
"""Weight of doubling a cost against errors of measurements: large vectors alone determine no cost of messages, and must
not make them free."""

ROUNDS = 6
HALVINGS = 4

Predict = Callable[[int, Costs], float]
"""`predict(i, costs)` returns the predicted seconds of measurement i."""

_Vector = tuple[float, float, float]
"""Alpha, overhead, gamma."""


class Fitted(msgspec.Struct, frozen=True):
    """Costs, and the median relative error of predictions before and after."""

    costs: Costs
    before: float
    after: float


def fit(measured: Sequence[float], predict: Predict, start: Costs | None = None) -> Fitted:
    """Return the costs under which predictions fit measurements best.

    Args:
        measured: seconds, more than 0.
        predict: called with the index of a measurement and costs; about 5 times for each measurement and round.
        start: the initial costs.

    Returns:
        the costs; the initial ones where nothing was measured.
    """
    begin = start or Costs()
    if not measured:
        return Fitted(begin, 0.0, 0.0)
    at = known = (begin.alpha, begin.overhead, begin.gamma)

    def errors(values: _Vector) -> list[float]:
        costs = Costs(*values)
        off = [predict(index, costs) / seconds - 1.0 for index, seconds in enumerate(measured)]
        return off + [PRIOR * (v - b) / max(b, s) for v, b, s in zip(values, known, SCALES, strict=True)]

    first = now = errors(at)
    for _ in range(ROUNDS):
        columns = [_slope(errors, at, now, each) for each in range(len(SCALES))]
        step = _solve(columns, now, at)
        better = _shorten(errors, at, step, _loss(now))
        if better is None:
            break
        gained = 1.0 - _loss(better[1]) / _loss(now) if _loss(now) else 0.0
        at, now = better
        if gained < 1e-3:
            break
    count = len(measured)
    return Fitted(Costs(*at), _median_error(first[:count]), _median_error(now[:count]))


def _vector(values: Iterable[float]) -> _Vector:
    alpha, overhead, gamma = values
    return alpha, overhead, gamma


def _median_error(errors: Sequence[float]) -> float:
    return statistics.median(abs(each) for each in errors)


def _loss(errors: Sequence[float]) -> float:
    """Return Huber's loss: quadratic near zero, linear beyond."""
    return sum(e * e if abs(e) <= NEAR else NEAR * (2 * abs(e) - NEAR) for e in errors)


def _slope(errors: Callable[[_Vector], list[float]], at: _Vector, now: Sequence[float], which: int) -> list[float]:
    """Return how each error changes with one cost, per SCALES of it."""
    step = max(0.05 * at[which], 0.02 * SCALES[which])
    moved = errors(_vector(value + step * (index == which) for index, value in enumerate(at)))
    return [(after - before) / step * SCALES[which] for after, before in zip(moved, now, strict=True)]


def _solve(columns: Sequence[Sequence[float]], now: Sequence[float], at: _Vector) -> _Vector:
    """Return the best step of the linearised problem that leaves no cost below zero.

    With three unknowns, every subset of them can be tried at zero.
    """
    weights = [1.0 if abs(e) <= NEAR else NEAR / abs(e) for e in now]
    floor = [-value / scale for value, scale in zip(at, SCALES, strict=True)]
    best, least = (0.0, 0.0, 0.0), float("inf")
    for held in itertools.product((False, True), repeat=len(at)):
        step = [low if fixed else 0.0 for low, fixed in zip(floor, held, strict=True)]
        free = [index for index, fixed in enumerate(held) if not fixed]
        target = [-(e + _dot(columns, row, step)) for row, e in enumerate(now)]
        for index, value in zip(free, _normal(columns, free, weights, target), strict=True):
            step[index] = value
        if any(value < low - 1e-12 for value, low in zip(step, floor, strict=True)):
            continue
        left = sum(w * (e + _dot(columns, row, step)) ** 2 for row, (w, e) in enumerate(zip(weights, now, strict=True)))
        if left < least:
            best, least = _vector(value * scale for value, scale in zip(step, SCALES, strict=True)), left
    return best


def _dot(columns: Sequence[Sequence[float]], row: int, step: Sequence[float]) -> float:
    return sum(column[row] * value for column, value in zip(columns, step, strict=True))


def _normal(
    columns: Sequence[Sequence[float]], free: Sequence[int], weights: Sequence[float], target: Sequence[float]
) -> list[float]:
    """Solve weighted least squares for some columns by Gaussian elimination; a column without influence stays at
    zero."""
    count = len(free)
    rows = [
        [sum(w * a * b for w, a, b in zip(weights, columns[i], columns[j], strict=True)) for j in free]
        + [sum(w * a * t for w, a, t in zip(weights, columns[i], target, strict=True))]
        for i in free
    ]
    for index in range(count):
        rows[index][index] += 1e-9 * (1.0 + rows[index][index])  # similar columns share what they explain
    for pivot in range(count):
        most = max(range(pivot, count), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[most] = rows[most], rows[pivot]
        for row in range(count):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    return [rows[index][count] / rows[index][index] for index in range(count)]


def _shorten(
    errors: Callable[[_Vector], list[float]], at: _Vector, step: _Vector, loss: float
) -> tuple[_Vector, list[float]] | None:
    """Return the costs after the step, halved until they fit better; None when they never do."""
    for _ in range(HALVINGS):
        moved = _vector(max(0.0, value + move) for value, move in zip(at, step, strict=True))
        found = errors(moved)
        if _loss(found) < loss:
            return moved, found
        step = _vector(move / 2 for move in step)
    return None
