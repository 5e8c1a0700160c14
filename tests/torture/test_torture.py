"""The torture run and docs/failures.md name the same faults, and every row of that page has a test that exists."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from tests.torture.faults import FAULTS
from tests.torture.promises import ROOT, TORTURE, Promise, promise_of, promises
from tests.torture.trial import LEAST, MOST, choose

ROWS = promises()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_by_one_row(fault: object) -> None:
    name = getattr(fault, "name", "")
    assert [name in row.faults for row in ROWS].count(True) == 1
    assert name in promise_of(name).faults


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.failure[:40])
def test_a_row_names_tests_and_faults_that_exist(row: Promise) -> None:
    known = {fault.name for fault in FAULTS}
    assert set(row.faults) <= known
    named = [each.strip() for each in row.tests.split(TORTURE)[0].split(",") if each.strip()]
    assert named or row.faults, f"nothing tests: {row.failure}"
    file = ""
    for each in named:
        given, _, function = each.partition("::")
        if given:
            file = given if "/" in given else f"tests/whole/{given}.py"
        found = ROOT / file
        assert found.exists(), f"{row.failure}: {file}"
        if function:
            prefix = re.escape(function.removesuffix("..."))
            ends = "" if function.endswith("...") else r"\b"
            assert re.search(rf"^def {prefix}{ends}", found.read_text(), re.M), f"{row.failure}: {each}"


def test_a_fault_without_a_row_is_refused() -> None:
    with pytest.raises(KeyError, match=r"no row of docs/failures\.md names the fault 'flood'"):
        promise_of("flood")


def test_a_row_with_another_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row with 3 columns instead of 4: \| a \| b \| c \|"):
        promises("| failure | action | pause | tests |\n|---|---|---|---|\n| a | b | c |\n")


def test_faults_follow_from_the_seed_and_at_most_one_costs_a_host() -> None:
    trials = [choose(random.Random(seed)) for seed in range(300)]
    assert trials == [choose(random.Random(seed)) for seed in range(300)]
    assert {len(faults) for faults in trials} == set(range(LEAST, MOST + 1))
    assert max(sum(fault.costs_host for fault in faults) for faults in trials) == 1
    assert Counter(fault.name for faults in trials for fault in faults).keys() == {fault.name for fault in FAULTS}
    assert all(fault.name == "power" for fault in choose(random.Random(1), ["power"]))
