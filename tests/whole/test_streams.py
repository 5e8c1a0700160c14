"""Streams in real jobs: workers are killed and jobs resume, and each example is in a step once an epoch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Ended, Psctl, next_event, rest_of, set_args

pytestmark = [pytest.mark.whole, pytest.mark.timeout(240)]

JOB = str(ROOT / "tests" / "whole" / "counted" / "job.yaml")
EPOCHS, STEPS = 3, 12


def options(home: Path, strategy: str, *words: str) -> list[str]:
    """Return the options of a training of two workers on a stream of 12 shards of 8 examples."""
    servers = "1" if strategy == "ps" else "0"
    return [
        "--env", f"RESULT={home / 'result'}",
        *set_args("--epochs", str(EPOCHS), "--pause", "0.02", "--shards", "12", *words),
        "--strategy", strategy, "--servers", servers, "--set", "restart.on_worker_loss=wait", "--set",
        "checkpoint.every=5 steps", "--set", "replicas=auto", "--set", "sync.update=auto", "-o", "jsonl",
    ]  # fmt: skip


def check(home: Path) -> None:
    """Check that each example was once an epoch in a step, which is the mean of eight."""
    assert json.loads((home / "result").read_text()) == pytest.approx([EPOCHS / 8] * 96, rel=1e-12)


@pytest.mark.parametrize(
    "strategy", ["ps", *(pytest.param(each, marks=pytest.mark.soak) for each in ("ring", "native"))]
)
def test_a_killed_worker_costs_no_example(tmp_path: Path, strategy: str) -> None:
    with Psctl(tmp_path).start("train", JOB, *options(tmp_path, strategy, "--hold", "17")) as process:
        while next_event(process, "progress")["step"] < 17:
            pass
        (killed,) = tmp_path.glob("result.1.*")
        os.kill(int(killed.suffix[1:]), signal.SIGKILL)
        (tmp_path / "result.go17").touch()
        out, err = rest_of(process, 200)
    run = Ended(process.returncode, out, err)
    assert run.code == 0, run
    check(tmp_path)
    assert run.of("worker-lost"), "a worker was killed"
    assert bool(run.of("restored")) == (strategy != "ps"), "only under ps others go on meanwhile"
    assert run.of("finished")[0]["steps"] == EPOCHS * STEPS


@pytest.mark.soak
def test_a_checkpoint_is_continued_by_another_number_of_workers(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    done = psctl.run("train", JOB, *options(tmp_path, "ps"), "--set", "checkpoint.keep=100")
    assert done.code == 0, done
    check(tmp_path)
    (tmp_path / "result").unlink()
    again = psctl.run("checkpoint", "restore", "counted@20", "--workers", "1", "-o", "jsonl")
    assert again.code == 0, again
    check(tmp_path)
    assert again.of("finished")[0]["steps"] == EPOCHS * STEPS - 20
