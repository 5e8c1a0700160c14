"""What a reduction may be: an operation that doesn't care who is added to whom, or in which order.

Every schedule joins contributions in an order of its own, so an operation must be associative and commutative; then
and only then do all schedules give the same (floats: up to rounding). Each is described by its algebra and by a
reference on Python's numbers; lists are joined element by element. The same on tensors is runtime/'s.

A user's own function is tried on samples first (`check_operation`): what a counterexample shows is refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Generic, Literal, TypeVar

import msgspec

from psctl.errors import UsageError

Value = TypeVar("Value")

Kind = Literal["integers", "floats", "bools"]

Number = int | float

NUMBERS: tuple[Kind, ...] = ("integers", "floats")
WHOLE: tuple[Kind, ...] = ("integers", "bools")
ALL: tuple[Kind, ...] = ("integers", "floats", "bools")


class Operation(msgspec.Struct, frozen=True):
    """A way to join two values into one.

    Args:
        name: as users write it.
        identity: joined with any value it gives that value (logical: whether it is true); None where none fits every
            type (the type's largest for min, its smallest for max).
        kinds: what it takes.
        join: the reference on two numbers, bools, or pairs (argmin).
        finish: what is done to the result of so many contributions, at every rank in the same way; None for nothing.
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


class Counterexample(msgspec.Struct, frozen=True):
    """Values on which a function breaks a law that every reduction needs."""

    law: Literal["commutative", "associative"]
    operands: tuple[Any, ...]
    left: Any
    right: Any

    def __str__(self) -> str:
        names = [repr(value) for value in self.operands]
        if self.law == "commutative":
            one, other = names
            forms = f"f({one}, {other})", f"f({other}, {one})"
        else:
            one, other, third = names
            forms = f"f(f({one}, {other}), {third})", f"f({one}, f({other}, {third}))"
        return f"not {self.law}: {forms[0]} is {self.left!r}, but {forms[1]} is {self.right!r}"


class Measure(msgspec.Struct, Generic[Value], frozen=True):
    """How values of a type are compared; runtime/ has one for tensors.

    Args:
        same: whether two are equal to the last bit.
        distance: how far two are apart; infinite where they can't be compared.
        magnitude: how large one is.
        eps: the type's relative rounding; 0 where there is none, so that only equal is equal.
    """

    same: Callable[[Value, Value], bool]
    distance: Callable[[Value, Value], float]
    magnitude: Callable[[Value], float]
    eps: float


def measure_of(sample: Any) -> Measure[Any]:
    """Return how Python's numbers, and lists and tuples of them, are compared: floats with rounding, others exactly."""
    return Measure(_same, _distance, _magnitude, sys.float_info.epsilon if _has_float(sample) else 0.0)


def check_operation(
    function: Callable[[Value, Value], Value],
    samples: Sequence[Value],
    measure: Measure[Value] | None = None,
    roundings: float = 8.0,
) -> Counterexample | None:
    """Return values on which a function is not associative or not commutative; None when all samples pass.

    Every pair and every triple of the samples is tried, so a dozen is enough: small integers, both signs, zero, one,
    and for floats some that are no round numbers. Floats may differ by `roundings` eps of the magnitudes that took
    part: the operands and all results on the way.

    Args:
        function: joins two values.
        samples: values of one type.
        measure: how they are compared; that of Python's numbers when None.
        roundings: how many eps of the magnitudes are allowed.

    Raises:
        Exception: whatever the function raises on the samples, as it is; the function's fault.
    """
    if not samples:
        return None
    rule = measure or measure_of(samples)

    def agree(left: Value, right: Value, others: Sequence[Value]) -> bool:
        if rule.same(left, right):
            return True
        if not rule.eps:
            return False
        allowed = roundings * rule.eps * sum(rule.magnitude(value) for value in (left, right, *others))
        return rule.distance(left, right) <= allowed

    for one, other in product(samples, repeat=2):
        left, right = function(one, other), function(other, one)
        if not agree(left, right, (one, other)):
            return Counterexample("commutative", (one, other), left, right)
    for one, other, third in product(samples, repeat=3):
        first, second = function(one, other), function(other, third)
        left, right = function(first, third), function(one, second)
        if not agree(left, right, (one, other, third, first, second)):
            return Counterexample("associative", (one, other, third), left, right)
    return None


def _has_float(value: Any) -> bool:
    return any(map(_has_float, value)) if isinstance(value, list | tuple) else isinstance(value, float)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        alike = isinstance(other, list | tuple) and len(one) == len(other)
        return alike and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _distance(one: Any, other: Any) -> float:
    """Return the largest distance of any two elements; infinite where the shapes differ."""
    if isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            return math.inf
        return max(map(_distance, one, other), default=0.0)
    if _same(one, other):
        return 0.0
    gap = abs(one - other)
    return math.inf if gap != gap else float(gap)


def _magnitude(value: Any) -> float:
    """Return the largest magnitude of any element; 0 for what is not finite, which allows no difference."""
    if isinstance(value, list | tuple):
        return max(map(_magnitude, value), default=0.0)
    return float(abs(value)) if math.isfinite(value) else 0.0
