"""A job that outlives its certificates: here they live for 20 seconds, and a server is replaced after 35."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, STEADY, Psctl, processes, set_args

pytestmark = [pytest.mark.whole, pytest.mark.soak]


def test_processes_that_come_when_first_certificates_are_over_are_let_in(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(ROOT / "psctl", package / "psctl", ignore=shutil.ignore_patterns("__pycache__"))
    authority = package / "psctl" / "transport" / "protocol" / "authority.py"
    text = authority.read_text()
    assert "LIFE = 7 * DAY\n" in text
    authority.write_text(text.replace("LIFE = 7 * DAY\n", "LIFE = 20.0\n", 1))
    home = tmp_path / "home"
    home.mkdir()
    psctl = Psctl(home, environment={"PYTHONPATH": str(package)})
    begin, killed, events = time.monotonic(), False, []
    arguments = ["--servers", "2", "--set", "replicas=1", *set_args("--epochs", "30", "--pause", "0.2")]
    with psctl.start("train", str(STEADY), "-o", "jsonl", *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            if not killed and time.monotonic() - begin > 35 and events[-1]["event"] == "progress":
                killed = True
                os.kill(processes(home, "server")[0], signal.SIGKILL)
    assert killed, "training lasts longer than that"
    assert process.returncode == 0, (events[-1], [event for event in events if event["event"] == "notice"])
    assert [event["event"] for event in events if event["event"] in ("server-lost", "restored")] == ["server-lost"]
    log = next((home / ".psctl" / "host" / "jobs").glob("steady-1/*/agent.log")).read_text()
    assert "has a new certificate" in log
