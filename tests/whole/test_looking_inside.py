"""A running job looked at from outside: trace, profile, the live page, a report; and training goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, set_args, until

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Psctl]:
    psctl = Psctl(tmp_path_factory.mktemp("home"))
    digits = str(ROOT / "templates" / "digits" / "job.yaml")
    started = psctl.run("train", digits, "-d", *set_args("--epochs", "100000"), "--set", "sync.strategy=ps")
    assert started.code == 0, started
    try:
        until(lambda: _step(psctl) > 30, 60, 0.3, "30 steps")
        yield psctl
    finally:
        psctl.run("stop", "digits", "--force")


def _step(psctl: Psctl) -> int:
    (job,) = psctl.run("status", "digits", "-o", "json").document["jobs"]
    return int(job["step"] or 0)


@contextlib.contextmanager
def page_of(psctl: Psctl, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    with psctl.start("ui", *words, "-o", "json") as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def test_the_newest_steps_are_traced(running: Psctl, tmp_path: Path) -> None:
    done = running.run("trace", "digits", "-o", str(tmp_path / "trace.json"), "--output", "json")
    assert done.code == 0, done
    steps = [path["step"] for path in done.document["steps"]]
    assert len(steps) == 10
    assert steps == list(range(steps[0], steps[0] + 10))
    for path in done.document["steps"]:
        assert path["last"] in ("worker/0", "worker/1")
        parts = path["load"] + path["wait"] + path["compute"] + path["after"]
        assert 0 < path["seconds"] < 10
        assert parts == pytest.approx(path["seconds"], rel=0.01)
    assert done.document["clocks"]["local"] < 0.1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {each["name"] for each in events if each["ph"] == "X" and each["pid"] == 1}
    assert {"load", "forward", "backward", "synchronize", "update", f"step {steps[0]}"} <= kinds


def test_steps_that_come_are_waited_for(running: Psctl, tmp_path: Path) -> None:
    for ahead in (4, 16, 64):  # seconds; psctl may take longer than that to ask where the machine is busy
        began, before = time.monotonic(), _step(running)
        now = _step(running)
        rate = (now - before) / (time.monotonic() - began)
        first = now + 50 + round(ahead * rate)
        done = running.run("trace", "digits", "--steps", f"{first}:{first + 2}", "-o", str(tmp_path / "t.json"))
        assert done.code == 0, done
        assert "was ready last in" in done.out
        if f"waiting for step {first + 2:,}" in done.err:
            return
    raise AssertionError(f"no step was waited for: {done}")


def test_a_worker_is_profiled(running: Psctl, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    done = running.run("profile", "digits", "-r", "worker:1", "--steps", "2", "-o", str(file))
    assert done.code == 0, done
    assert "Self CPU" in done.out and "aten::" in done.out
    names = {each.get("name") for each in json.loads(file.read_text())["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
    assert running.run("profile", "digits", "-r", "worker:9").code == 6
    assert running.run("profile", "digits", "-r", "server:0").code == 2


def test_a_report_of_a_running_job_has_what_is_known(running: Psctl, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = running.run("report", "digits", "-o", str(file), "--output", "json")
    assert done.code == 0, done
    assert done.document == {"jobs": ["digits-1"], "path": str(file), "bytes": file.stat().st_size}
    text = file.read_text()
    assert '"worker/1"' in text and '"loss"' in text
    assert running.run("report", "digits", "-o", "json").code == 2
    assert running.run("report", "digits", "-o", "nowhere/report.html").code == 2
    assert running.run("report", "nothing").code == 6


def test_the_live_page_is_served_until_ctrl_c(running: Psctl) -> None:
    with page_of(running, "digits") as (process, said):
        assert said["jobs"] == ["digits-1"]
        with urllib.request.urlopen(said["url"], timeout=20) as answer:
            assert b"digits-1" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(said["url"].partition("?")[0], timeout=20)
        with urllib.request.urlopen(said["url"].replace("/?", "/changes?"), timeout=20) as stream:
            until(lambda: b'"examples_per_second"' in stream.readline(), name="a change with rates")
        taken = running.run("ui", "--port", str(said["port"]), "-o", "json")
        assert (taken.code, taken.document["error"]["code"]) == (7, "port-taken")
    assert process.returncode == 0, process.stderr.read() if process.stderr else ""


def test_training_goes_on(running: Psctl) -> None:
    before = _step(running)
    until(lambda: _step(running) > before, 30, 0.3, "another step")
    (job,) = running.run("status", "digits", "-o", "json").document["jobs"]
    assert job["state"] == "running"


def test_a_job_that_has_ended_is_not_traced_but_reported(running: Psctl, tmp_path: Path) -> None:
    """Last: it ends the job."""
    assert running.run("stop", "digits", "--force").code == 0
    ended = running.run("trace", "digits", "-o", str(tmp_path / "t.json"))
    assert ended.code == 6, ended
    assert "psctl report digits-1" in ended.err
    assert not (tmp_path / "t.json").exists()
    assert running.run("report", "digits", "-o", str(tmp_path / "r.html")).code == 0
