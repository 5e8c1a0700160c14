"""Servers that step some shards in backward, in real processes: the values of steps after it, also when a worker is
lost in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Ended, Psctl, set_args

pytestmark = pytest.mark.whole

JOB = ROOT / "tests" / "whole" / "in_backward" / "job.yaml"
IN_BACKWARD = ("--set", "sync.step_in_backward=true")


def train(home: Path, *words: str) -> tuple[Ended, str]:
    """Run the job; return its end, and the digest of its last values."""
    result = home / "result"
    result.unlink(missing_ok=True)
    run = Psctl(home).run("train", str(JOB), "-o", "jsonl", *words, "--env", f"RESULT={result}")
    assert run.code == 0, run
    return run, result.read_text()


@pytest.mark.soak  # tests/ps/test_steps_in_backward.py, tests/simulation
def test_a_worker_that_is_lost_in_backward_changes_no_bit(tmp_path: Path) -> None:
    _, expected = train(tmp_path)
    undisturbed, values = train(tmp_path, *IN_BACKWARD)
    chosen = undisturbed.of("steps-in-backward")
    assert [(event["buckets"] > 0, event["measured"]) for event in chosen] == [(True, [])], undisturbed
    assert values == expected
    lost, values = train(tmp_path, *IN_BACKWARD, *set_args("--end-at", "12", "--ended", str(tmp_path / "ended")))
    restored = lost.of("restored")
    assert [event["step"] for event in restored] == [10], lost
    assert "was lost in backward, when some of its step was made" in restored[0]["reason"], lost
    assert values == expected
