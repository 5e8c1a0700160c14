"""The callbacks of Hugging Face's and Lightning's Trainers: progress, a stop with their checkpoint, resume, a loss."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Ended, Psctl, next_event, processes, rest_of

pytestmark = pytest.mark.whole

SCRIPTS = Path(__file__).parent / "followed"
STEPS = 40

JOB = """\
version: 1
name: followed
script: train.py
workers: {per_host: 2}
checkpoint: {every: 10 steps}
metrics: {interval: 100ms}
timeouts: {start: 5m}
"""


def test_importing_the_package_imports_no_trainer() -> None:
    code = "import sys, psctl.callbacks; sys.exit(bool({'transformers', 'lightning', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


class Followed:
    """A job whose Trainer psctl follows.

    Args:
        home: of psctl; gets the job's folder.
        script: of `followed`.
    """

    def __init__(self, home: Path, script: str) -> None:
        self.psctl = Psctl(home)
        self.file = home / "job" / "job.yaml"
        self.file.parent.mkdir()
        shutil.copy(SCRIPTS / f"{script}.py", self.file.parent / "train.py")
        self.file.write_text(JOB)

    def arguments(self, *options: str, **variables: str) -> list[str]:
        given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
        words = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
        return ["train", str(self.file), "-o", "jsonl", *options, *words]

    def train(self, *options: str, **variables: str) -> Ended:
        return self.psctl.run(*self.arguments(*options, **variables), timeout=500)


def parameters(events: list[dict[str, Any]]) -> str:
    """Return the line that the script prints at its end."""
    (found,) = [each["text"] for each in events if each["event"] == "log" and each["text"].startswith("trained: ")]
    return str(found)


def next_kept(running: subprocess.Popen[str], kind: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next event of a kind; keep it and those before it."""
    assert running.stdout is not None
    for line in running.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == kind:
            return events[-1]
    raise AssertionError(f"the job ended without the event {kind}")


def begins(events: list[dict[str, Any]]) -> list[int]:
    """Return the steps after which the ranks began."""
    texts = [each["text"] for each in events if each["event"] == "log"]
    return [int(found[1]) for text in texts if (found := re.fullmatch(r"rank \d begins after step (\d+)", text))]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "library"), [("hf_trainer", "transformers"), ("lightning_trainer", "lightning")])
def test_a_trainer_shows_steps_stops_with_its_checkpoint_and_resumes(tmp_path: Path, script: str, library: str) -> None:
    pytest.importorskip(library)
    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = Followed(whole, script).train()
    assert undisturbed.code == 0, undisturbed
    end = undisturbed.events[-1]
    assert (end["status"], end["steps"]) == ("done", STEPS), undisturbed
    assert {each["total"] for each in undisturbed.of("progress")} == {STEPS}
    assert end["metrics"]["loss"] > 0
    assert [each["step"] for each in undisturbed.of("checkpoint")][-1] == STEPS

    job = Followed(tmp_path, script)
    with job.psctl.start(*job.arguments(PAUSE="1.2")) as running:
        while next_event(running, "progress")["step"] < 12:
            pass
        stopped = job.psctl.run("stop", "--save", "-o", "json")
        assert stopped.code == 0, stopped
        out, err = rest_of(running, 100)
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["status"] == "stopped", err
    step = events[-1]["steps"]
    assert 12 < step < STEPS
    assert [each["step"] for each in events if each["event"] == "checkpoint"][-1] == step
    assert not [each for each in events if each["event"] == "log" and "trained" in each["text"]], "its tail did not run"

    resumed = job.train("--resume", "latest")
    assert resumed.code == 0, resumed
    assert begins(resumed.events) == [step, step]
    assert (resumed.events[-1]["status"], resumed.events[-1]["steps"]) == ("done", STEPS - step)
    assert parameters(resumed.events) == parameters(undisturbed.events), "as if it had not stopped"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "library"), [("hf_trainer", "transformers"), ("lightning_trainer", "lightning")])
@pytest.mark.parametrize("accelerated", ["0", "1"], ids=["own sums", "accelerated"])
def test_after_a_loss_all_continue_from_the_trainers_last_checkpoint(
    tmp_path: Path, script: str, library: str, accelerated: str
) -> None:
    pytest.importorskip(library)
    job = Followed(tmp_path, script)
    strategy = ["--strategy", "ring"] if accelerated == "1" else []
    with job.psctl.start(*job.arguments(*strategy, PAUSE="0.5", ACCELERATE=accelerated)) as running:
        events: list[dict[str, Any]] = []  # with what the next processes print before the job says that it goes on
        assert next_kept(running, "checkpoint", events)["step"] == 10
        os.kill(processes(job.psctl.home, "worker")[-1], signal.SIGKILL)
        assert "signal 9" in next_kept(running, "worker-lost", events)["reason"]
        restored = next_kept(running, "restored", events)
        out, err = rest_of(running, 300)
    events += [json.loads(line) for line in out.splitlines()]
    assert events[-1]["status"] == "done", err
    assert events[-1]["steps"] == STEPS
    assert restored["step"] in (10, 20)
    assert begins(events)[-2:] == [restored["step"]] * 2
    assert {each["chosen"] for each in events if each["event"] == "plan"} in (set(), {"ring"})


@pytest.mark.soak
def test_a_strategy_that_a_trainer_cannot_have_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    refused = Followed(tmp_path, "lightning_trainer").train("--strategy", "ring")
    assert refused.code == 1, refused
    assert "which sums gradients itself" in str(refused.events[-1]["failure"])
