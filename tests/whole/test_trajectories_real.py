"""Real processes take the trajectory of one process on the joint batch, and the same one every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.exact_job import ExactJob, assert_near

pytestmark = pytest.mark.whole


@pytest.mark.parametrize(
    ("optimizer", "workers", "servers", "update"),
    [
        pytest.param("sgd", 2, 1, "server", marks=pytest.mark.soak),
        pytest.param("adamw", 3, 2, "server", marks=pytest.mark.soak),  # tests/whole/test_restore_numbers.py: 2 and 2
        pytest.param("radam", 2, 2, "worker", marks=pytest.mark.soak),
    ],
)
def test_100_steps_in_float64_equal_one_process_on_the_joint_batch(
    tmp_path: Path, optimizer: str, workers: int, servers: int, update: str
) -> None:
    exact = ExactJob(tmp_path)
    expected = exact.alone("--optimizer", optimizer)
    assert (expected.step, expected.world) == (100, 1)
    run, found = exact.train(workers, servers, "--optimizer", optimizer, update=update)
    [ps] = [each for each in run.of("plan")[-1]["candidates"] if each["strategy"] == "ps"]
    assert ps["params"] == {"servers": servers, "update": update, "hosts": ["local"] * servers}
    assert found.world == workers
    assert_near(found, expected)


@pytest.mark.soak  # a resumed run is equal to the bit: tests/whole/test_hosts_job.py
def test_in_float32_a_run_repeats_to_the_bit(tmp_path: Path) -> None:
    exact = ExactJob(tmp_path)
    words = ("--optimizer", "adamw", "--dtype", "float32")
    _, first = exact.train(2, 2, *words)
    _, second = exact.train(2, 2, *words)
    assert first.step == 100
    assert first == second
