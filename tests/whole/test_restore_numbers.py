"""A run that loses a server, or continues from a checkpoint, ends with the numbers of one undisturbed process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.exact_job import ExactJob, assert_near
from tests.helpers.running import processes

pytestmark = pytest.mark.whole


def test_a_server_is_killed_and_a_checkpoint_resumes_with_other_numbers_of_workers_and_servers(tmp_path: Path) -> None:
    """In float64; the checkpoint is from the middle of an epoch."""
    exact = ExactJob(tmp_path)
    expected = exact.alone("--optimizer", "adamw")
    left = ["server"]

    def kill(event: dict[str, Any]) -> None:
        if left and event["event"] == "checkpoint" and event["step"] == 48:
            os.kill(processes(exact.psctl.home, left.pop())[0], signal.SIGKILL)

    words = ("--optimizer", "adamw", "--pause", "0.05")
    run, found = exact.train(2, 2, *words, replicas=1, disturb=kill)
    assert [event["rank"] for event in run.of("server-lost")] == [0]
    assert not run.of("restored")
    assert_near(found, expected)
    saved = {each["step"] for each in run.of("checkpoint")}
    assert {24, 48} <= saved and len(saved) >= 4, "of 24, 48, 72, 96 and 100 one may be given up at the recovery"

    run, found = exact.restore("exact-1@48", 1, 1)
    assert run.of("restored")[0]["checkpoint"] == "exact-1@48"
    assert run.events[-1]["steps"] == 100 - 48
    assert found.world == 1
    assert_near(found, expected)


@pytest.mark.soak
def test_it_continues_with_fewer_workers_and_then_with_more(tmp_path: Path) -> None:
    exact = ExactJob(tmp_path)
    expected = exact.alone("--optimizer", "adamw")
    exact.train(2, 2, "--optimizer", "adamw")
    for checkpoint, workers, servers in (("exact-1@48", 1, 1), ("exact-1@72", 3, 1)):  # both in the middle of an epoch
        run, found = exact.restore(checkpoint, workers, servers)
        assert run.of("restored")[0]["checkpoint"] == checkpoint
        assert run.events[-1]["steps"] == 100 - run.of("restored")[0]["step"]
        assert found.world == workers
        assert_near(found, expected)


@pytest.mark.soak
def test_in_float32_on_the_same_numbers_it_is_equal_to_the_bit(tmp_path: Path) -> None:
    exact = ExactJob(tmp_path)
    words = ("--optimizer", "radam", "--dtype", "float32")
    _, expected = exact.train(2, 2, *words)
    run, found = exact.restore("exact-1@24", 2, 2)
    assert run.of("restored")[0]["step"] == 24
    assert found == expected
