"""`sync.update: sharded` in real processes: over the engine, and over psctl's connections, with steps in backward, when
a worker is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.exact_job import EXACT, ExactJob, assert_near
from tests.helpers.running import Ended, processes, set_args

pytestmark = pytest.mark.whole


def train(
    exact: ExactJob, folder: Path, strategy: str, *words: str, kill_at: int = 0, given: tuple[str, ...] = ()
) -> Ended:  # fmt: skip
    """Train on two workers; kill the second one at a step."""
    lines = []
    with exact.psctl.start(
        "train", str(EXACT / "job.yaml"), "-o", "jsonl", "--workers", "2", "--servers", "0", "--strategy", strategy,
        "--set", "sync.update=sharded", *given, *set_args("--optimizer", "adamw", *words),
        "--env", f"RESULT={folder / 'result.json'}",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            lines.append(line)
            event = json.loads(line)
            if kill_at and event["event"] == "progress" and event["step"] >= kill_at:
                os.kill(processes(exact.psctl.home, "worker")[1], signal.SIGKILL)
                kill_at = 0
        err = process.stderr.read()
    return Ended(process.returncode, "".join(lines), err)


@pytest.mark.soak  # tests/sync/test_sharded.py; the test below trains too
def test_over_the_engine_it_trains_as_one_process_does(tmp_path: Path) -> None:
    exact = ExactJob(tmp_path)
    expected = exact.alone("--optimizer", "adamw", "--epochs", "6")
    run = train(exact, tmp_path, "native", "--epochs", "6")
    assert run.code == 0, run
    assert run.of("plan")[-1]["reason"].endswith("; each worker steps a part of the parameters"), run
    assert_near(exact.result(), expected)


def test_a_killed_worker_has_all_continue_from_the_checkpoint(tmp_path: Path) -> None:
    exact = ExactJob(tmp_path)
    expected = exact.alone("--optimizer", "adamw", "--clip", "0")
    small = ("--set", "sync.step_in_backward=true", "--set", "sync.bucket=200")
    run = train(exact, tmp_path, "ring", "--clip", "0", "--pause", "0.05", kill_at=40, given=small)
    assert run.code == 0, run
    assert [event["rank"] for event in run.of("worker-lost")] == [1], run
    assert len(run.of("restored")) == 1, run
    assert_near(exact.result(), expected)
