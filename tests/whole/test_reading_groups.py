"""Groups that read the servers live: every read is of one step, whatever is killed, and the last is the final one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, processes

pytestmark = pytest.mark.whole

JOB = str(ROOT / "tests" / "whole" / "reading" / "job.yaml")
STEPS = 150
APART = 20  # steps between two kills: a server and a worker lost at once send the job back to its last checkpoint


def follow(home: Path, kills: list[str], *options: str) -> list[dict[str, Any]]:
    """Train; from the evaluating group's first read on, kill a process of each of these roles. Return the events."""
    left, events, due = list(kills), [], 0
    with Psctl(home).start("train", JOB, "-o", "jsonl", *options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            reads = events[-1]["event"] == "group" and events[-1]["group"] == "evaluate"
            if reads and left and events[-1]["step"] >= due:
                os.kill(processes(home, left.pop(0))[-1], signal.SIGKILL)
                due = events[-1]["step"] + APART
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    assert not left, "every victim was killed"
    return events


def lines(events: list[dict[str, Any]], rank: str, word: str) -> list[list[str]]:
    found = [event["text"].split() for event in events if event["event"] == "log" and event["rank"] == rank]
    return [words[1:] for words in found if words[0] == word]


def check(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Check all reads of both groups; return how many there were."""
    exact = [[float(word) for word in words] for words in lines(events, "reader/0", "read")]
    for step, least, most, rest, *_, calls in exact:
        assert least == most == step, "a read of several steps"
        assert rest == 0
        assert calls in (step, step - 1, step + 1), "buffers are those of the step, or the newest"
    newest = [[float(word) for word in words] for words in lines(events, "reader/1", "read")]
    for step, least, most, rest, *_ in newest:
        assert step <= least <= most <= STEPS
        assert rest == 0, "its keys leave out the other layers"
    for found in (exact, newest):
        assert found[-1][:3] == [STEPS, STEPS, STEPS]
        assert found[-1][4:8] == [STEPS, STEPS, STEPS, 0]
        assert all(a <= b for a, b in zip(found[-1][4:7], found[-1][4:7], strict=True))
    reports = [event for event in events if event["event"] == "group"]
    names = {(event["group"], *event["metrics"]) for event in reports}
    assert names == {("evaluate", "least", "ratio"), ("serve", "least")}
    said = [event["text"] for event in events if event["event"] == "log" and event["rank"] == "reader/1"]
    assert any(text.startswith("psctl: ratio is nan at step ") for text in said), "a number that is not finite"
    assert not [event for event in events if event["event"] == "restored"]
    return len(exact), len(newest)


@pytest.mark.soak  # tests/reader has one process
def test_groups_read_one_step_at_a_time_while_processes_are_killed(tmp_path: Path) -> None:
    # Readers start with training, and need seconds on a busy machine: steps long enough that most come after that.
    events = follow(tmp_path, ["server", "reader", "worker"], "--env", "PAUSE=0.1")
    exact, newest = check(events)
    assert exact >= 10
    assert newest >= 5
    assert [event["rank"] for event in events if event["event"] == "server-lost"] != []
    assert [event["rank"] for event in events if event["event"] == "worker-lost"] != []


@pytest.mark.soak
def test_a_group_that_always_fails_costs_the_job_nothing(tmp_path: Path) -> None:
    options = ("--set", "groups=[{name: evaluate, module: no_such_module}]", "--set", "restart.max=1")
    run = Psctl(tmp_path).run("train", JOB, *options, "--env", "STEPS=40", "--env", "PAUSE=0.1")
    assert run.code == 0, run
    said = run.out + run.err
    assert "reader/0 (evaluate) on local failed" in said
    assert "No module named" in said
    assert "it is started again (1 of 1)" in said
    assert "it is not started again after 1 new starts (restart.max), and training continues" in said


@pytest.mark.soak
def test_embeddings_of_a_read_model_take_their_rows_from_the_servers(tmp_path: Path) -> None:
    groups = "groups=[{name: evaluate, script: embeddings.py, args: [read]}]"
    options = ("--set", "script=embeddings.py", "--set", "args=[train]", "--set", groups)
    events = follow(tmp_path, [], *options)
    found = lines(events, "reader/0", "read")
    for step, dense, item, *_ in found:
        assert float(dense) == float(step)
        assert float(item) >= float(step), "rows are as new as the values, or newer"
    # Key 1 is once in a batch; the bag of keys 1 and 2 has two rows.
    assert found[-1] == ["60", "60", "60", "120", "0", "False"]
