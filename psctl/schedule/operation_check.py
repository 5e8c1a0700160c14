"""Checks on samples that a user's function is fit for a reduction: associative and commutative.

Every schedule reduces contributions in an order of its own, so a function with a result that depends on the order or
the grouping is refused, with the values that show it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

Value = TypeVar("Value")

Operand: TypeAlias = Any
"""A number, or lists and tuples of numbers. Any: the operators are those of the user's values."""


class Counterexample(msgspec.Struct, frozen=True):
    """Values on which a function is not commutative, or not associative."""

    law: Literal["commutative", "associative"]
    operands: tuple[Operand, ...]
    left: Operand
    right: Operand

    def __str__(self) -> str:
        names = [repr(value) for value in self.operands]
        if self.law == "commutative":
            one, other = names
            forms = f"f({one}, {other})", f"f({other}, {one})"
        else:
            one, other, third = names
            forms = f"f(f({one}, {other}), {third})", f"f({one}, f({other}, {third}))"
        return f"not {self.law}: {forms[0]} is {self.left!r}, but {forms[1]} is {self.right!r}"


class ValueMeasure(msgspec.Struct, Generic[Value], frozen=True):
    """Compares values of a type; process/user_functions.py has one for tensors.

    Args:
        same: returns whether two values are equal to the last bit.
        distance: of two values; infinite where they can't be compared.
        magnitude: of a value.
        eps: the type's relative rounding; 0 where there is none, so that only equal is equal.
    """

    same: Callable[[Value, Value], bool]
    distance: Callable[[Value, Value], float]
    magnitude: Callable[[Value], float]
    eps: float


def measure_of(sample: Operand) -> ValueMeasure[Operand]:
    """Return the measure of Python's numbers, lists and tuples: floats compare with rounding, others exactly."""
    return ValueMeasure(_same, _distance, _magnitude, sys.float_info.epsilon if _has_float(sample) else 0.0)


def check_operation(
    function: Callable[[Value, Value], Value],
    samples: Sequence[Value],
    measure: ValueMeasure[Value] | None = None,
    roundings: float = 8.0,
) -> Counterexample | None:
    """Return values on which a function is not associative or not commutative; None when all samples pass.

    Every pair and every triple of the samples is tried, so a dozen is enough: small integers, both signs, zero, one,
    and for floats some that are not whole. Floats may differ by `roundings` eps of the magnitudes of the operands and
    of all intermediate results.

    Args:
        function: joins two values.
        samples: values of one type.
        measure: compares them; that of Python's numbers when None.
        roundings: number of eps of the magnitudes that are allowed.

    Raises:
        Exception: any exception that the function raises on the samples; the function's fault.
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


def _has_float(value: Operand) -> bool:
    return any(map(_has_float, value)) if isinstance(value, list | tuple) else isinstance(value, float)


def _same(one: Operand, other: Operand) -> bool:
    if isinstance(one, list | tuple):
        alike = isinstance(other, list | tuple) and len(one) == len(other)
        return alike and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _distance(one: Operand, other: Operand) -> float:
    """Return the largest distance of any two elements; infinite where the shapes differ."""
    if isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            return math.inf
        return max(map(_distance, one, other), default=0.0)
    if _same(one, other):
        return 0.0
    gap = abs(one - other)
    return math.inf if gap != gap else float(gap)


def _magnitude(value: Operand) -> float:
    """Return the largest magnitude of any element; 0 for one that is not finite, which allows no difference."""
    if isinstance(value, list | tuple):
        return max(map(_magnitude, value), default=0.0)
    return float(abs(value)) if math.isfinite(value) else 0.0
