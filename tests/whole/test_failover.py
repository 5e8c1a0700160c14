"""Processes of a training job are killed in its midst: it continues, and ends with the undisturbed run's parameters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, processes

pytestmark = pytest.mark.whole

STEADY = str(ROOT / "tests" / "whole" / "steady" / "job.yaml")


def train(home: Path, *victims: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Train; kill the n-th process of a role when a step is reached: (role, n, step) each. Return the events."""
    psctl, left = Psctl(home), list(victims)
    home.mkdir(exist_ok=True)
    arguments = ["--servers", "3", "--set", "replicas=1", "--set", 'args=["--epochs", "6", "--pause", "0.02"]']
    events = []
    with psctl.start("train", STEADY, "-o", "jsonl", *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            step = events[-1].get("step", 0) if events[-1]["event"] == "progress" else 0
            if left and step >= left[0][2]:
                role, number, _ = left.pop(0)
                os.kill(processes(home, role)[number], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert not left, "every victim was killed"
    return events


def digests(events: list[dict[str, Any]]) -> dict[str, str]:
    lines = [(event["rank"], event["text"]) for event in events if event["event"] == "log"]
    return {rank: text for rank, text in lines if text.startswith("digest")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("undisturbed") / "home")


@pytest.mark.soak  # tests/whole/test_restore_numbers.py kills one too
def test_a_server_that_is_killed_costs_nothing_but_time(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    events = train(tmp_path / "home", ("server", 0, 15))
    assert [event["rank"] for event in events if event["event"] == "server-lost"] == [0]
    assert not [event for event in events if event["event"] == "restored"]
    assert digests(events) == digests(undisturbed)
    assert events[-1]["metrics"] == undisturbed[-1]["metrics"]


@pytest.mark.soak
def test_workers_and_servers_that_are_killed_one_after_the_other(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    events = train(tmp_path / "home", ("worker", 1, 12), ("server", 2, 30))
    assert [event["rank"] for event in events if event["event"] == "worker-lost"] == [1]
    assert digests(events)["worker/0"] == digests(undisturbed)["worker/0"]
    assert events[-1]["metrics"]["loss"] == undisturbed[-1]["metrics"]["loss"]
