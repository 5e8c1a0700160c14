"""Hybrid jobs, dense parameters and rows of embeddings, lose workers and servers: the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, processes

pytestmark = pytest.mark.whole

JOB = str(ROOT / "tests" / "whole" / "embedded" / "job.yaml")
SUM = re.compile(r"steps (\d+) rows (\d+) sum (\S+) bits (\w+)")


def train(home: Path, *options: str, kills: tuple[tuple[int, str, int], ...] = ()) -> list[dict[str, Any]]:
    """Train; kill the n-th process of a role at a step: (step, role, n) each. Return the events."""
    home.mkdir(exist_ok=True)
    events, left = [], list(kills)
    with Psctl(home).start("train", JOB, "-o", "jsonl", *options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            if left and event["event"] == "progress" and event["step"] >= left[0][0]:
                _, role, which = left.pop(0)
                os.kill(processes(home, role)[which], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    assert not left, "every victim was killed"
    return events


def result(events: list[dict[str, Any]]) -> tuple[str, ...]:
    (found,) = [found for each in events if each["event"] == "log" and (found := SUM.fullmatch(each["text"]))]
    return found.groups()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_a_lost_worker_and_a_lost_server_change_no_bit(tmp_path: Path, strategy: str) -> None:
    options = ("--set", f"sync.strategy={strategy}", "--set", "restart.max=9")
    expected = result(train(tmp_path / "undisturbed", *options, "--set", 'args=["--pause", "0"]'))
    assert expected[:2] == ("60", "197")
    kills = ((9, "worker", 1), (23, "server", 0), (37, "worker", 0))
    events = train(tmp_path / "disturbed", *options, kills=kills)
    reasons = [event["reason"] for event in events if event["event"] == "restored"]
    early = "worker/0 was lost before its state at the next step's start had reached the servers"
    assert all(early in reason for reason in reasons), f"replaced, but for: {reasons}"
    assert result(events) == expected


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "words", "alike"),
    [
        ("ps", ("--prefetch",), True),
        ("ring", ("--prefetch",), True),
        ("ps", ("--pool", "server"), False),
        ("ps", ("--prefetch", "--filters", '[{"random_skip": 0.2}, "int8"]'), False),
    ],
)
def test_losses_under_prefetch_pooled_bags_and_filters(
    tmp_path: Path, strategy: str, words: tuple[str, ...], alike: bool
) -> None:
    options = ("--set", f"sync.strategy={strategy}", "--set", "restart.max=9")
    plain = result(train(tmp_path / "plain", *options, "--set", 'args=["--pause", "0"]'))
    still = json.dumps(["--pause", "0", *words])
    expected = result(train(tmp_path / "undisturbed", *options, "--set", f"args={still}"))
    assert (expected == plain) is alike, "a prefetch changes nothing; sums and filters round"
    assert expected[0] == "60"
    kills = ((9, "worker", 1), (23, "server", 0), (37, "worker", 0))
    events = train(tmp_path / "disturbed", *options, "--set", f"args={json.dumps([*words])}", kills=kills)
    found = result(events)
    if "--filters" in words:  # what a filter has withheld is lost with its worker
        assert found[:2] == expected[:2]
        assert float(found[2]) == pytest.approx(float(expected[2]), rel=0.01)
    else:
        assert found == expected


@pytest.mark.soak
def test_a_checkpoint_restores_on_another_number_of_servers_and_workers(tmp_path: Path) -> None:
    expected = result(train(tmp_path, "--set", 'args=["--pause", "0"]'))
    for servers, workers in (("2", "2"), ("3", "1")):
        again = Psctl(tmp_path).run(
            "checkpoint", "restore", "embedded-1@30", "--servers", servers, "--workers", workers, "-o", "jsonl"
        )
        assert again.code == 0, again
        found = result(again.events)
        if workers == "2":
            assert found == expected
        assert found[:2] == expected[:2]
        assert float(found[2]) == pytest.approx(float(expected[2]), abs=1e-9)


@pytest.mark.parametrize("strategy", ["ps", "ring"])
@pytest.mark.soak  # test_stores.py loses one there too
def test_a_worker_lost_before_the_end_of_its_clock_is_replaced(tmp_path: Path, strategy: str) -> None:
    """It has not marked the checkpoint of that step either."""
    still = ("--pause", "0", "--epochs", "1")
    options = ("--set", f"sync.strategy={strategy}", "--set", "checkpoint.every=5 steps")
    expected = result(train(tmp_path / "undisturbed", *options, "--set", f"args={json.dumps([*still])}"))
    events = train(
        tmp_path / "disturbed", *options, "--set", f"args={json.dumps([*still, '--dies', '5'])}",
        "--set", "timeouts.stall=60s", "--env", f"DIED={tmp_path / 'died'}",
    )  # fmt: skip
    assert [event["rank"] for event in events if event["event"] == "worker-lost"] == [1]
    assert not [event for event in events if event["event"] == "restored"]
    assert result(events) == expected


@pytest.mark.soak  # tests/sparse has it in one process
def test_rows_of_two_workers_are_those_of_one(tmp_path: Path) -> None:
    args = ("--set", 'args=["--pause", "0", "--epochs", "2"]')
    one = result(train(tmp_path / "one", "--workers", "1", *args))
    two = result(train(tmp_path / "two", *args))
    assert one[:2] == two[:2]
    assert float(one[2]) == pytest.approx(float(two[2]), abs=1e-9)
