"""Every strategy that is asked for trains to the values of one process; on the command line, as users ask for them.

All strategies in processes without a job around them: tests/collectives/test_strategies_gloo.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.exact_job import EXACT, ExactJob, assert_near
from tests.helpers.running import ROOT, Ended, Psctl

pytestmark = pytest.mark.whole

EPOCHS = "4"
"""Of 5 steps."""


def train(exact: ExactJob, folder: Path, strategy: str, workers: int) -> Ended:
    cluster = folder / "one.yaml"
    cluster.write_text(
        f"version: 1\nname: one\nruntime: {{python: {sys.executable}, environment: existing}}\n"
        "hosts: [{address: local, slots: 4}]\n"
    )
    return exact.psctl.run(
        "train", str(EXACT / "job.yaml"), "-o", "jsonl", "--cluster", str(cluster), "--workers", str(workers),
        "--strategy", strategy, "--set", f"args=[--epochs, '{EPOCHS}']", "--env", f"RESULT={folder / 'result.json'}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        pytest.param("ring", 3, marks=pytest.mark.soak),  # tests/collectives/test_strategies_gloo.py plays all of them
        pytest.param("cpu", 2, marks=pytest.mark.soak),
        pytest.param("double-tree", 4, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_a_collective_that_is_requested_trains_as_one_process_does(tmp_path: Path, strategy: str, workers: int) -> None:
    exact = ExactJob(tmp_path)
    expected = exact.alone("--epochs", EPOCHS)
    run = train(exact, tmp_path, strategy, workers)
    assert run.code == 0, run
    plan = run.of("plan")[-1]
    assert (plan["chosen"], plan["decided"], plan["world"]) == (strategy, True, workers), plan
    finished = run.events[-1]
    assert (finished["status"], finished["steps"]) == ("done", expected.step)
    assert run.of("progress")[-1]["bytes_per_second"] > 0
    found = exact.result()
    assert found.world == workers
    assert_near(found, expected)


@pytest.mark.soak  # tests/collectives/test_strategies_gloo.py ends a rank in the middle of a sum
def test_a_rank_that_raises_is_named_and_the_others_do_not_hang(tmp_path: Path) -> None:
    """Its peers lose their connections in the middle of a sum; that is not the first failure."""
    psctl = Psctl(tmp_path)
    run = psctl.run(
        "train", str(ROOT / "tests" / "whole" / "steady" / "job.yaml"), "-o", "jsonl", "--strategy", "halving-doubling",
        "--workers", "2", "--set", "args=[--raise-at, '5']",
    )  # fmt: skip
    assert run.code == 1, run
    failure = run.events[-1]["failure"]
    assert (failure["role"], failure["rank"]) == ("worker", 1), run
    assert failure["exception"].startswith("ValueError: NaN loss at step 5"), run
    assert failure["step"] == 5
