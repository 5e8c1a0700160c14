"""Reductions on rows of tensors equal the references; folding duplicates of one push gives the same."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from psctl.errors import UsageError
from psctl.ps.tables.reductions import custom, reductions
from tests.reference.operations import operations

FLOATS = [0.0, -0.0, 1.5, -2.25, 3.0, math.inf, -math.inf, math.nan, 0.1]
WHOLE = [0, 1, -1, 5, 12, -7, 3]


def same(one, other) -> bool:
    return math.isclose(one, other, rel_tol=1e-12) or one == other or (one != one and other != other)


def test_reduction_names_equal_those_of_the_references() -> None:
    assert set(reductions()) == set(operations())


@pytest.mark.parametrize("name", sorted(set(operations()) - {"mean", "argmin"}))
def test_every_reduction_combines_pairs_as_the_reference(name: str) -> None:
    reduction, reference = reductions()[name], operations()[name]
    for kind, samples, dtype in (("floats", FLOATS, torch.float64), ("integers", WHOLE, torch.int64)):
        if kind not in reference.kinds:
            continue
        for one, other in itertools.product(samples, repeat=2):
            left = reduction.lanes(torch.tensor([[one]], dtype=dtype))
            right = reduction.lanes(torch.tensor([[other]], dtype=dtype))
            found = reduction.join(left, right).values.item()
            wanted = reference.join(one, other)
            assert same(found, wanted), (name, one, other)
            if name in ("min", "max") and found == 0.0 and dtype.is_floating_point:
                assert math.copysign(1, found) == math.copysign(1, wanted), (one, other)


def test_a_mean_divides_by_the_number_of_values() -> None:
    mean = reductions()["mean"]
    lanes = mean.lanes(torch.tensor([[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]]))
    folded = mean.fold(lanes, torch.tensor([0, 0, 0]), 1)
    assert mean.finish(folded).tolist() == [[4.0, 2.0]]
    assert folded.extra is not None
    assert folded.extra.tolist() == [[3]]


def test_argmin_keeps_the_lowest_index_of_the_smallest_value() -> None:
    argmin, reference = reductions()["argmin"], operations()["argmin"]
    pairs = [(value, index) for value in (1.0, 2.0, math.nan, -math.inf) for index in (3, 1)]
    for one, other in itertools.product(pairs, repeat=2):
        left = argmin.lanes(torch.tensor([[one[0]]]), torch.tensor([[one[1]]]))
        right = argmin.lanes(torch.tensor([[other[0]]]), torch.tensor([[other[1]]]))
        found = argmin.join(left, right)
        wanted = reference.join(one, other)
        assert found.extra is not None
        assert same(found.values.item(), wanted[0]) and found.extra.item() == wanted[1], (one, other)


@pytest.mark.parametrize("name", ["sum", "prod", "max", "bitwise-xor", "logical-or"])
def test_folding_duplicates_equals_combining_them_one_by_one(name: str) -> None:
    reduction, numbers = reductions()[name], random.Random(3)
    groups = sorted(numbers.choices(range(7), k=40))
    groups = [sorted(set(groups)).index(group) for group in groups]
    rows = torch.tensor([[numbers.randint(0, 5), numbers.randint(1, 3)] for _ in groups])
    found = reduction.fold(reduction.lanes(rows), torch.tensor(groups), groups[-1] + 1)
    for group in range(groups[-1] + 1):
        wanted = None
        for row, of in zip(rows, groups, strict=True):
            if of == group:
                lanes = reduction.lanes(row[None])
                wanted = lanes if wanted is None else reduction.join(wanted, lanes)
        assert wanted is not None
        assert found.values[group].tolist() == wanted.values[0].tolist()


def test_a_reduction_refuses_unsupported_dtypes() -> None:
    with pytest.raises(UsageError, match=r"mean.*int64"):
        reductions()["mean"].check(torch.int64)
    with pytest.raises(UsageError, match=r"bitwise-or.*float32"):
        reductions()["bitwise-or"].check(torch.float32)
    custom("mine:gcd", torch.gcd).check(torch.int64)
