"""A run that goes on from a checkpoint ends with the numbers of one process that was never disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from numbers_of import Exact, assert_near

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


def test_in_float64_on_another_number_of_workers_and_servers(tmp_path: Path) -> None:
    exact = Exact(tmp_path)
    expected = exact.alone("--optimizer", "adamw")
    run, found = exact.train(2, 2, "--optimizer", "adamw")
    assert_near(found, expected)
    assert [each["step"] for each in run.of("checkpoint")] == [24, 48, 72, 96, 100]
    for checkpoint, workers, servers in (("exact-1@48", 1, 1), ("exact-1@72", 3, 1)):  # both in the middle of an epoch
        run, found = exact.restore(checkpoint, workers, servers)
        assert run.of("restored")[0]["checkpoint"] == checkpoint
        assert run.events[-1]["steps"] == 100 - run.of("restored")[0]["step"]
        assert found.world == workers
        assert_near(found, expected)


@pytest.mark.soak
def test_in_float32_on_the_same_numbers_it_is_equal_to_the_bit(tmp_path: Path) -> None:
    exact = Exact(tmp_path)
    words = ("--optimizer", "radam", "--dtype", "float32")
    _, expected = exact.train(2, 2, *words)
    run, found = exact.restore("exact-1@24", 2, 2)
    assert run.of("restored")[0]["step"] == 24
    assert found == expected
