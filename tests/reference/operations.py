"""The reductions of `psctl/ps/tables/reductions.py` on Python's numbers: what the ones on tensors are compared with.

Every schedule reduces contributions in an order of its own, so an operation must be associative and commutative; then
and only then do all schedules give the same result (floats: up to rounding). Lists are reduced element by element.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from psctl.errors import UsageError

Kind = Literal["integers", "floats", "bools"]

Number = int | float

NUMBERS: tuple[Kind, ...] = ("integers", "floats")
WHOLE: tuple[Kind, ...] = ("integers", "bools")
ALL: tuple[Kind, ...] = ("integers", "floats", "bools")


class Operation(msgspec.Struct, frozen=True):
    """An operation that joins two values into one.

    Args:
        name: for users.
        identity: joined with any value it gives that value (logical: whether it is true); None where none fits every
            type (the type's largest for min, its smallest for max).
        kinds: the kinds of values that it joins.
        join: the reference on two numbers, bools, or pairs (argmin).
        finish: the last step, on the result of a number of contributions, equal on every rank; None for none.
    """

    name: str
    identity: Any
    kinds: tuple[Kind, ...]
    join: Callable[[Any, Any], Any]
    finish: Callable[[Any, int], Any] | None = None

    def reduce(self, contributions: Sequence[Any]) -> Any:
        """Return all contributions joined from the first to the last, and finished.

        Args:
            contributions: at least one; numbers, pairs (argmin), or lists of them, all of one length.

        Raises:
            ValueError: none, or lists of different lengths; the caller's fault.
        """
        if not contributions:
            raise ValueError(f"{self.name} of nothing")
        if isinstance(contributions[0], list):
            return [self.reduce(column) for column in zip(*contributions, strict=True)]
        found = contributions[0]
        for value in contributions[1:]:
            found = self.join(found, value)
        return self.finish(found, len(contributions)) if self.finish else found


def operations() -> dict[str, Operation]:
    """Return all operations by name."""
    found = (
        Operation("sum", 0, NUMBERS, operator.add),
        Operation("mean", 0, ("floats",), operator.add, operator.truediv),
        Operation("prod", 1, NUMBERS, operator.mul),
        Operation("min", None, NUMBERS, least),
        Operation("max", None, NUMBERS, largest),
        Operation("logical-and", True, ALL, lambda one, other: bool(one) and bool(other)),
        Operation("logical-or", False, ALL, lambda one, other: bool(one) or bool(other)),
        Operation("logical-xor", False, ALL, lambda one, other: bool(one) != bool(other)),
        Operation("bitwise-and", -1, WHOLE, operator.and_),
        Operation("bitwise-or", 0, WHOLE, operator.or_),
        Operation("bitwise-xor", 0, WHOLE, operator.xor),
        Operation("logsumexp", -math.inf, ("floats",), log_sum_exp),
        Operation("argmin", None, NUMBERS, lower),
    )
    return {one.name: one for one in found}


def operation(name: str) -> Operation:
    """Return the operation of this name.

    Raises:
        UsageError: there is none; the caller's fault.
    """
    known = operations()
    if name not in known:
        raise UsageError(f"no reduction is called {name!r}", hint=f"one of: {', '.join(known)}; or module:function")
    return known[name]


def least(one: Number, other: Number) -> Number:
    """Return the smaller number; not-a-number wins, and -0.0 comes before 0.0, so that the order never matters."""
    if one != one or other != other:
        return one if one != one else other
    return min(one, other, key=_signed)


def largest(one: Number, other: Number) -> Number:
    """Return the larger number; not-a-number wins, and 0.0 comes after -0.0, so that the order never matters."""
    if one != one or other != other:
        return one if one != one else other
    return max(one, other, key=_signed)


def lower(one: tuple[Number, int], other: tuple[Number, int]) -> tuple[Number, int]:
    """Return the (value, index) with the smaller value, of equal ones that with the lower index."""
    blank, other_blank = one[0] != one[0], other[0] != other[0]
    if blank != other_blank:
        return one if blank else other
    if blank or one[0] == other[0]:
        return one if one[1] <= other[1] else other
    return one if one[0] < other[0] else other


def log_sum_exp(one: float, other: float) -> float:
    """Return log(exp(one) + exp(other)) without overflow."""
    if one != one or other != other:
        return math.nan
    top, rest = max(one, other), min(one, other)
    return top if math.isinf(top) or math.isinf(rest) else top + math.log1p(math.exp(rest - top))


def _signed(value: Number) -> tuple[Number, float]:
    return value, math.copysign(1.0, value) if isinstance(value, float) else 0.0
