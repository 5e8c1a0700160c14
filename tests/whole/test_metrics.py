"""Metrics for other programs: one run on the local cluster with TensorBoard and Prometheus, and a killed exporter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from psctl.job import events
from tests.helpers.running import ROOT, Psctl, set_args, until

pytestmark = pytest.mark.whole

DIGITS = str(ROOT / "templates" / "digits" / "job.yaml")
SHORT = set_args("--epochs", "8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def notices(home: Path) -> list[str]:
    (log,) = home.rglob("events.jsonl")
    found = [events.from_line(line) for line in log.read_bytes().splitlines()]
    return [each.text for each in found if isinstance(each, events.Notice)]


def page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def with_loss(port: int) -> str:
    text = page(port)
    return text if 'name="loss"' in text else ""


def exporters(home: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "psctl.export.main" in (line := process.info["cmdline"] or []) and str(home) in line[-1]
    ]


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = run.communicate(timeout=100)
    return run.returncode, out + err


def test_a_run_is_shown_by_tensorboard_and_prometheus(tmp_path: Path) -> None:
    psctl, port = Psctl(tmp_path), free_port()
    metrics = (f"metrics.tensorboard={tmp_path}/tb", f"metrics.prometheus={port}", "metrics.interval=200ms")
    run = psctl.start("train", DIGITS, *SHORT, *(word for each in metrics for word in ("--set", each)))
    seen = until(lambda: with_loss(port), 60.0, name="a metric on the page")
    code, said = ended(run)
    assert code == 0, said
    assert 'psctl_processes{job="digits-1",role="worker",state="running"} 2.0' in seen
    assert "psctl_examples_per_second{" in seen
    found = EventAccumulator(str(tmp_path / "tb" / "digits-1"))
    found.Reload()
    assert found.Scalars("accuracy")[-1].value >= 0.9
    assert len(found.Scalars("psctl/sync_seconds")) > 1
    assert sorted(notices(tmp_path)) == [
        f"metrics are written for Prometheus at http://127.0.0.1:{port}/metrics on the head",
        f"metrics are written for TensorBoard; on the head: tensorboard --logdir {tmp_path}/tb/digits-1",
    ]
    until(lambda: not exporters(tmp_path), 20.0, name="the exporter's end")


def test_training_goes_on_without_a_killed_exporter_and_says_so_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        psctl = Psctl(tmp_path)
        run = psctl.start(
            "train", DIGITS, *SHORT, "--set", f"metrics.prometheus={port}", "--set", "metrics.tensorboard=true"
        )
        (pid,) = until(lambda: exporters(tmp_path), 60.0, name="the exporter")
        until(lambda: list(tmp_path.rglob("events.out.*")), 30.0, name="its file")
        until(lambda: [each for each in notices(tmp_path) if "listens" in each], 30.0, name="the taken port's notice")
        os.kill(pid, signal.SIGKILL)
        code, said = ended(run)
    assert code == 0, said
    assert exporters(tmp_path) == []
    told = [each for each in notices(tmp_path) if each.startswith("metrics:")]
    assert len(told) == 2, told
    assert told[0].startswith(f"metrics: prometheus: another process listens on 127.0.0.1:{port}; another port")
    assert told[1].startswith("metrics: the exporter has ended (killed by signal 9); training goes on without it")
