"""Incremental checkpoints of a job whose server is killed, and the job that continues from one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psctl import Reader
from tests.helpers.running import ROOT, Psctl, processes

pytestmark = pytest.mark.whole

JOB = str(ROOT / "tests" / "whole" / "incremental" / "job.yaml")


def train(home: Path, kill_at: int) -> list[dict[str, Any]]:
    """Train; kill a server when a step is reached. Return the events."""
    events = []
    with Psctl(home).start("train", JOB, "-o", "jsonl") as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            if kill_at and events[-1]["event"] == "progress" and events[-1]["step"] >= kill_at:
                kill_at = 0
                os.kill(processes(home, "server")[0], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said + "\n".join(map(str, events))
    return events


def rows(events: list[dict[str, Any]]) -> str:
    (found,) = [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("rows ")]
    return found


@pytest.mark.soak  # tests/ps/test_incremental_checkpoints.py has it in one process
def test_incremental_checkpoints_survive_a_killed_server_and_restore_to_the_bit(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    events = train(tmp_path, 18)
    assert [event["rank"] for event in events if event["event"] == "server-lost"]
    saved = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    assert all(saved[step]["written"] < saved[step]["bytes"] / 5 for step in (10, 15))
    shown = psctl.run("checkpoint", "show", "incremental-1@15", "-o", "json").document
    assert (shown["written"], shown["earlier_steps"]) == (saved[15]["written"], [5, 10])
    out = tmp_path / "rows.safetensors"
    assert psctl.run("checkpoint", "export", "incremental-1@15", str(out), "--table", "rows").code == 0
    assert len(Reader(out)) == 20_000
    again = psctl.run("checkpoint", "restore", "incremental-1@30", "--servers", "3", "-o", "jsonl")
    assert again.code == 0, again
    assert rows(again.events) == rows(events)
    assert psctl.run("checkpoint", "prune", "incremental-1", "--keep", "1", "--yes").code == 0
    assert psctl.run("checkpoint", "verify", "incremental-1@latest").code == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_host_that_leads_later_goes_on_from_its_copies(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", 0)
    hosts = make_hosts(3)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    text = hosts.cluster_text().replace("- h2", "- {address: h2, slots: 2}")
    cluster.write_text(text.replace("- h1", "- {address: h1, roles: [server]}"))  # no worker is lost with the head
    options = ["--cluster", str(cluster), "--servers", "3", "--set", "checkpoint.copies=2"]
    slow = ["--set", 'args=["--pause", "0.5"]']
    job = psctl.run("train", JOB, *options, *slow, "-d", "-o", "json", timeout=200).document["job"]
    events, lost = [], False
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        assert follower.stdout is not None
        for line in follower.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "checkpoint" and events[-1]["step"] == 20:  # those before are copied
                lost = True
                hosts.crash("h1")
    assert lost, "\n".join(str(event) for event in events if event["event"] != "progress")
    assert rows(events) == rows(plain)
    saved = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    assert saved[15]["written"] < saved[15]["bytes"] / 5
    assert max(saved) > 25
    for which in ("10", "latest"):
        assert psctl.run("checkpoint", "verify", f"{job}@{which}", timeout=120).code == 0
