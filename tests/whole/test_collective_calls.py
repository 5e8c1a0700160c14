"""The collectives of a script in real jobs: under servers, after a lost worker, and when a rank stops or sleeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.running import Psctl, set_args

pytestmark = pytest.mark.whole

CALLING = Path(__file__).parent / "calling" / "job.yaml"

WRONG = "run.all_reduce: ranks gave different shapes: rank 1: [4]; rank 0: [3]"


def calls(events: list[dict[str, object]]) -> list[dict[str, object]]:
    texts = [str(each["text"]) for each in events if each["event"] == "log"]
    return [json.loads(text.removeprefix("calls ")) for text in texts if text.startswith("calls ")]


@pytest.mark.soak  # tests/collectives/test_beside_torch.py has their results
@pytest.mark.parametrize("strategy", ["ps", "native"])
def test_every_collective_is_called_beside_the_training(tmp_path: Path, strategy: str) -> None:
    run = Psctl(tmp_path).run("train", str(CALLING), "-o", "jsonl", "--strategy", strategy)
    assert run.code == 0, run
    found = sorted(calls(run.events), key=lambda each: int(str(each["rank"])))
    assert found == [{"rank": rank, "strategy": strategy, "seen": 24, "wrong": WRONG} for rank in (0, 1)]
    assert run.events[-1]["metrics"]["loss"] == 3.0


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ps", "ring", "native"])
def test_a_worker_killed_in_a_collective_has_all_start_again_from_the_checkpoint(tmp_path: Path, strategy: str) -> None:
    run = Psctl(tmp_path).run(
        "train", str(CALLING), "-o", "jsonl", "--strategy", strategy,
        *set_args("--kill-at", "5", "--mark", str(tmp_path / "killed")),
    )  # fmt: skip
    assert run.code == 0, run
    restored = [each for each in run.events if each["event"] == "restored"]
    assert len(restored) == 1 and str(restored[0]["checkpoint"]).startswith("calling-"), restored
    assert [each["seen"] for each in calls(run.events)] == [8, 8]  # the steps after the checkpoint of step 4


@pytest.mark.soak
@pytest.mark.parametrize("how", ["--stop-at", "--sleep-at"])
@pytest.mark.parametrize("strategy", ["ps", "native"])
def test_the_rank_that_everyone_waits_for_is_named(tmp_path: Path, strategy: str, how: str) -> None:
    run = Psctl(tmp_path).run(
        "train", str(CALLING), "-o", "jsonl", "--strategy", strategy, "--set", "timeouts.stall=5s", *set_args(how, "3")
    )
    assert run.code == 5, run
    failure = run.events[-1]["failure"]
    assert (failure["role"], failure["rank"]) == ("worker", 1), failure
    assert failure["exception"].startswith("TimedOut: worker/1 ") and "worker/0" not in failure["exception"], failure
