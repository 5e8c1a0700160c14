"""Reductions: their algebra, and the check of user functions."""

from __future__ import annotations

import math
import random
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import UsageError
from psctl.schedule.algorithms import catalog
from psctl.schedule.operation_check import ValueMeasure, check_operation, measure_of
from tests.helpers.reference_player import play
from tests.reference.operations import operation, operations

WHOLE = [-3, -2, -1, 0, 1, 2, 3, 7]
FRACTIONS = [0.1, -0.3, 1 / 3, 1000.7, -2.5, 0.0, 1e-5]
PAIRS = [(1, 0), (0, 1), (1, 2), (0, 3), (-2, 4)]
BOOLS = [False, True]


@pytest.mark.parametrize("name", operations())
def test_each_reduction_is_associative_and_commutative_on_its_types(name: str) -> None:
    one = operation(name)
    samples: dict[str, list[Any]] = {"integers": WHOLE, "floats": FRACTIONS, "bools": BOOLS}
    if name == "argmin":
        samples = {"integers": PAIRS, "floats": [(value / 3, index) for value, index in PAIRS]}
    for kind in one.kinds:
        assert check_operation(one.join, samples[kind]) is None, kind


@pytest.mark.parametrize(
    ("name", "values", "result"),
    [
        ("sum", [1, 2, 3, 4, 5], 15),
        ("mean", [1.0, 2.0, 6.0], 3.0),
        ("prod", [2, 3, -4], -24),
        ("min", [3, -1, 2], -1),
        ("max", [3, -1, 2], 3),
        ("logical-and", [True, True, False], False),
        ("logical-or", [False, True, False], True),
        ("logical-xor", [True, True, True], True),
        ("bitwise-and", [0b1110, 0b0111], 0b0110),
        ("bitwise-or", [0b1000, 0b0011], 0b1011),
        ("bitwise-xor", [0b1110, 0b0111], 0b1001),
        ("argmin", [(2, 0), (1, 3), (1, 1), (5, 2)], (1, 1)),
        ("sum", [[1, 2], [3, 4]], [4, 6]),
        ("mean", [[1.0, 2.0], [3.0, 4.0]], [2.0, 3.0]),
        ("argmin", [[(2, 0), (0, 0)], [(1, 1), (0, 1)]], [(1, 1), (0, 0)]),
    ],
)
def test_reductions_return_the_expected_results(name: str, values: list[Any], result: Any) -> None:
    assert operation(name).reduce(values) == result


def test_logsumexp_neither_overflows_nor_vanishes() -> None:
    one = operation("logsumexp")
    assert one.reduce([1000.0, 1000.0]) == pytest.approx(1000 + math.log(2))
    assert one.reduce([-1000.0, -1001.0, -1002.0]) == pytest.approx(-1000 + math.log(1 + math.exp(-1) + math.exp(-2)))
    assert one.reduce([-math.inf, 3.0]) == 3.0 and one.reduce([-math.inf, -math.inf]) == -math.inf
    assert one.reduce([math.inf, 3.0, math.inf]) == math.inf and math.isnan(one.reduce([math.nan, 1.0]))


def test_an_identity_leaves_values_unchanged() -> None:
    for one in operations().values():
        if one.identity is None:
            continue
        samples = BOOLS if one.name.startswith("logical") else FRACTIONS if "integers" not in one.kinds else WHOLE
        for value in samples:
            assert one.join(one.identity, value) == value == one.join(value, one.identity), one.name


@pytest.mark.parametrize("name", ["min", "max"])
def test_signed_zeros_and_nan_give_the_same_bits_in_any_order(name: str) -> None:
    join = operation(name).join
    assert math.copysign(1, join(0.0, -0.0)) == math.copysign(1, join(-0.0, 0.0)) == (-1 if name == "min" else 1)
    assert all(math.isnan(join(*pair)) for pair in [(math.nan, 1.0), (1.0, math.nan)])


def test_nan_is_smallest_and_the_lower_index_wins() -> None:
    one = operation("argmin")
    for values in ([(1.0, 0), (math.nan, 4), (math.nan, 2)], [(math.nan, 2), (math.nan, 4), (1.0, 0)]):
        found = one.reduce(values)
        assert math.isnan(found[0]) and found[1] == 2


def test_empty_and_uneven_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="sum of nothing"):
        operation("sum").reduce([])
    with pytest.raises(ValueError, match="shorter|longer"):  # noqa: RUF043
        operation("sum").reduce([[1, 2], [1]])
    with pytest.raises(UsageError, match="median"):
        operation("median")


@pytest.mark.parametrize(
    ("function", "samples", "law", "text"),
    [
        (lambda a, b: a - b, WHOLE, "commutative", "f(-3, -2) is -1, but f(-2, -3) is 1"),
        (lambda a, b: (a + b) / 2, WHOLE, "associative", "f(f(-3, -3), -2) is -2.5, but f(-3, f(-3, -2)) is -2.75"),
        (lambda a, b: (a + b) / 2, FRACTIONS, "associative", "f(f(0.1, 0.1), -0.3)"),
        (lambda a, b: abs(a - b), WHOLE, "associative", "f("),
        (lambda a, b: a, WHOLE, "commutative", "f("),
        (lambda a, b: [*a, *b], [[1], [2]], "commutative", "f([1], [2]) is [1, 2], but f([2], [1]) is [2, 1]"),
        (lambda a, b: a + b + 1e-9 * a * a * b, FRACTIONS, "commutative", "f("),
        (lambda a, b: round(a + b, 1), FRACTIONS, "associative", "f("),
    ],
)
def test_a_function_that_is_not_a_reduction_is_refused_with_the_counterexample(
    function: Any, samples: list[Any], law: str, text: str
) -> None:
    found = check_operation(function, samples)
    assert found is not None and found.law == law and text in str(found)
    if law == "commutative":
        assert (function(*found.operands), function(*found.operands[::-1])) == (found.left, found.right)
    else:
        a, b, c = found.operands
        assert (function(function(a, b), c), function(a, function(b, c))) == (found.left, found.right)


def test_floats_may_round_and_integers_must_be_exact() -> None:
    assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
    assert check_operation(lambda a, b: a + b, [0.1, 0.2, 0.3]) is None
    assert check_operation(lambda a, b: a + b, [0.1, 0.2, 0.3], roundings=0.0) is not None
    assert check_operation(lambda a, b: a + b + (a == 3 and b == 3), [1, 2, 3]) is not None
    tiny = check_operation(lambda a, b: a + b * (1 + 1e-13), FRACTIONS)
    assert tiny is not None and tiny.law == "commutative"


def test_user_reductions_work_on_user_values() -> None:
    """Union of sets, (min, +) on lists, the sum of complex pairs with a measure of their own."""
    assert check_operation(lambda a, b: a | b, [frozenset({1}), frozenset({2, 3}), frozenset()]) is None
    assert (
        check_operation(lambda a, b: [min(pair) for pair in zip(a, b, strict=True)], [[1, 5], [2, 3], [0, 9]]) is None
    )
    exact = ValueMeasure(lambda a, b: a == b, lambda a, b: abs(a - b), abs, 0.0)
    loose = ValueMeasure(lambda a, b: a == b, lambda a, b: abs(a - b), abs, 2.0**-52)
    values = [complex(0.1, 0.7), complex(-0.3, 0.2), complex(1 / 3, 1e3)]
    assert check_operation(lambda a, b: a + b, values, loose) is None
    assert check_operation(lambda a, b: a + b, values, exact) is not None
    assert check_operation(lambda a, b: a - b, []) is None
    assert measure_of([1, 2.0]).eps > 0 and measure_of([1, (2, 3)]).eps == 0


def test_nan_and_infinities_compare() -> None:
    assert check_operation(lambda a, b: math.nan, FRACTIONS) is None
    assert check_operation(lambda a, b: math.nan if a > b else 0.0, FRACTIONS) is not None
    assert check_operation(lambda a, b: math.inf if a > b else 0.0, FRACTIONS) is not None


@given(st.sampled_from(sorted(operations())), st.integers(2, 9), st.randoms(use_true_random=False))
def test_every_schedule_gives_the_reference(name: str, world: int, dice: random.Random) -> None:
    """Exactly, on integers, in the order of every schedule."""
    one = operation(name)
    values: list[Any] = [dice.choice(WHOLE) for _ in range(world)]
    if name == "argmin":
        values = list(zip(values, range(world), strict=True))
    elif "integers" not in one.kinds:
        return
    wanted = reduce(one.join, values)
    for strategy in ("ring", "tree", "recursive-doubling", "one-shot", "double-tree"):
        schedule = catalog.build(strategy, world)
        start = {(rank, chunk): values[rank] for rank in range(world) for chunk in range(len(schedule.shares))}
        ends = play(start, schedule.transfers, one.join)
        assert ends is not None and all(ends[place] == wanted for place in start)
