"""Servers that hold tables are killed while workers count words: every count is exact."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, processes

pytestmark = pytest.mark.whole

COUNTING = str(ROOT / "tests" / "whole" / "counting" / "job.yaml")


def count(home: Path, *kills: tuple[int, int], consistency: str = "asp", options: tuple[str, ...] = ()) -> Any:
    """Count words; kill the n-th server when worker 0 comes to a turn: (turn, n) each. Return the events."""
    left = list(kills)
    arguments = ["--set", f'args=["--consistency", "{consistency}"]', *options]
    events = []
    with Psctl(home).start("train", COUNTING, "-o", "jsonl", *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            told = event["event"] == "log" and event["rank"] == "worker/0" and event["text"].startswith("turn ")
            if told and left and int(event["text"].split()[1]) >= left[0][0]:
                os.kill(processes(home, "server")[left.pop(0)[1]], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    assert not left, "every victim was killed"
    return events


def results(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("turns ")]


@pytest.mark.soak
def test_counts_are_exact_when_a_server_is_killed(tmp_path: Path) -> None:
    events = count(tmp_path, (29, 0))
    assert [event["rank"] for event in events if event["event"] == "server-lost"] == [0]
    assert not [event for event in events if event["event"] == "restored"]
    assert results(events) == ["turns 200, wrong 0 of 300"] * 2


@pytest.mark.soak
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_counts_are_exact_when_servers_are_killed_one_after_the_other(tmp_path: Path, consistency: str) -> None:
    options = ("--servers", "3")
    events = count(tmp_path, (19, 0), (49, 1), (79, 2), consistency=consistency, options=options)
    assert len([event for event in events if event["event"] == "server-lost"]) == 3
    assert results(events) == ["turns 200, wrong 0 of 300"] * 2


# ---- checkpoints ---------------------------------------------------------------------------------------------------


TRAINING = ("--set", "script=train.py", "--set", "sync.strategy=ps", "--set", "checkpoint.every=10 steps")
EXACT = "taken 320 examples 6 to 6 times, steps 60"


def train(home: Path, step: int, *options: str, role: str = "server", which: int = 0) -> list[dict[str, Any]]:
    """Train; kill the first server, or who else is said, when a step is reached. Return the events."""
    home.mkdir(exist_ok=True)
    events, left = [], step
    with Psctl(home).start("train", COUNTING, "-o", "jsonl", *TRAINING, *options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            if left and event["event"] == "progress" and event["step"] >= left:
                left = 0
                os.kill(processes(home, role)[which], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    assert not left
    return events


def taken(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("taken ")]


@pytest.mark.soak
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_without_replicas_a_store_goes_back_with_the_rest_to_the_last_checkpoint(
    tmp_path: Path, consistency: str
) -> None:
    args = f'args=["--pause", "0.1", "--consistency", "{consistency}"]'
    events = train(tmp_path, 25, "--set", "replicas=0", "--set", args)
    (restored,) = [event for event in events if event["event"] == "restored"]
    assert restored["step"] >= 10
    assert taken(events) == [EXACT] * 2
    again = Psctl(tmp_path).run("checkpoint", "restore", "counting-1@50", "--servers", "3", "-o", "jsonl")
    assert again.code == 0, again
    assert taken(again.events) == [EXACT] * 2


@pytest.mark.timeout(240)
def test_a_worker_lost_before_the_end_of_its_clock_is_replaced_and_its_clock_ends(tmp_path: Path) -> None:
    args = 'args=["--epochs", "2", "--consistency", "bsp", "--dies", "7"]'
    done = Psctl(tmp_path).run(
        "train", COUNTING, "-o", "jsonl", *TRAINING, "--set", args, "--env", f"DIED={tmp_path / 'died'}", timeout=200
    )
    assert done.code == 0, done
    events = done.events
    assert [event["rank"] for event in events if event["event"] == "worker-lost"] == [1]
    assert not [event for event in events if event["event"] == "restored"]
    texts = [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("taken ")]
    assert texts == ["taken 320 examples 2 to 2 times, steps 20"] * 2


@pytest.mark.soak
def test_counting_and_training_continue_together_when_a_server_is_lost(tmp_path: Path) -> None:
    events = train(tmp_path, 25, "--servers", "3", "--set", 'args=["--pause", "0.1"]')
    assert not [event for event in events if event["event"] == "restored"]
    assert taken(events) == [EXACT] * 2


@pytest.mark.soak
@pytest.mark.parametrize("step", [11, 17, 25])
def test_the_unfinished_examples_of_a_worker_that_is_not_replaced_count_once(tmp_path: Path, step: int) -> None:
    options = ("--set", "restart.on_worker_loss=continue", "--set", 'args=["--pause", "0.1", "--consistency", "bsp"]')
    events = train(tmp_path, step, *options, role="worker", which=1)
    assert [event["rank"] for event in events if event["event"] == "worker-lost"] == [1]
    assert not [event for event in events if event["event"] == "restored"]
    (found,) = taken(events)
    assert found.startswith("taken 320 examples 6 to 6 times")


@pytest.mark.soak
def test_servers_that_come_and_go_take_stores_with_them(tmp_path: Path) -> None:
    psctl, wanted = Psctl(tmp_path), {10: "3", 30: "2"}
    args = 'args=["--pause", "1"]'  # a server's coming takes some of the 60 steps
    with psctl.start("train", COUNTING, "-o", "jsonl", *TRAINING, "--set", args) as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            step = events[-1]["step"] if events[-1]["event"] == "progress" else 0
            for at in [at for at in wanted if step >= at]:
                scaled = psctl.run("scale", "counting-1", "--servers", wanted[at], "-y")
                assert scaled.code == 0 or "are joining or leaving already" in scaled.err, scaled
                if scaled.code == 0:
                    del wanted[at]
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    assert not wanted
    assert not [event for event in events if event["event"] == "restored"]
    assert taken(events) == [EXACT] * 2
