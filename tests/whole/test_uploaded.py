"""A job whose checkpoints go to a URL: uploaded behind training, and refused early where a package is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from psctl.checkpoint.upload import CheckpointTarget
from tests.helpers.running import STEADY, Psctl, set_args

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(400)]
COMMON = ("--workers", "1", "--servers", "1", "-o", "jsonl")


def test_checkpoints_are_at_the_url_when_the_job_is_over(tmp_path: Path) -> None:
    psctl, target = Psctl(tmp_path), f"file://{tmp_path}/shelf"
    run = psctl.run(
        "train", str(STEADY), *COMMON, "--set", f"checkpoint.to={target}", "--set", "checkpoint.keep=2",
        "--set", "checkpoint.keep_best=null", *set_args("--epochs", "4"), timeout=300,
    )  # fmt: skip
    assert run.code == 0, run
    written = [event["step"] for event in run.of("checkpoint")]
    assert CheckpointTarget(target).steps("steady-1") == written[-2:]
    CheckpointTarget(target).fetch("steady-1", written[-1], tmp_path / "back" / f"{written[-1]:010d}")


def test_a_target_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "shelf").write_text("a file is in the way")
    run = Psctl(tmp_path).run(
        "train", str(STEADY), *COMMON, "--set", f"checkpoint.to={tmp_path}/shelf", *set_args("--epochs", "2"),
        timeout=300,
    )  # fmt: skip
    assert run.code == 0, run
    assert run.of("checkpoint")
    (log,) = tmp_path.glob(".psctl/**/events.jsonl")
    assert "is not uploaded" in log.read_text()


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named_before_training_starts(tmp_path: Path) -> None:
    run = Psctl(tmp_path).run("train", str(STEADY), *COMMON, "--set", "checkpoint.to=gs://bucket/shelf", timeout=300)
    assert run.code != 0
    error = run.document["error"]
    assert "needs gcsfs" in error["message"]
    assert "runtime.requirements" in error["hint"]
