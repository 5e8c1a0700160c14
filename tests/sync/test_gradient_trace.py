"""Gradients leave while backward still runs: read from the trace of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from psctl.client.server_waits import InFlightTimer
from psctl.sync.gradient_trace import GradientTrace, from_environment
from tests.helpers.job_world import Job
from tests.helpers.manual_clock import ManualClock


def script(run):
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(512, 256)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("update", ["server", "worker"])
def test_the_first_push_has_left_before_the_last_gradient_is_computed(update, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    Job(2, 2, update=update, target=1 << 18, traces={0: GradientTrace(str(path))}).run(script)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for clock in range(1, 5):
        computed = [one["time"] for one in events if one["event"] == "gradient" and one["clock"] == clock]
        left = [one["time"] for one in events if one["event"] == "push-bytes-left" and one["clock"] == clock]
        assert len(computed) == 12
        assert left, f"nothing left in clock {clock}"
        assert min(left) < max(computed), f"clock {clock}: the first push left after backward"


@pytest.mark.parametrize("update", ["server", "worker"])
def test_time_in_flight_while_backward_ran_is_reported_as_hidden(update) -> None:
    job = Job(2, 2, update=update, target=1 << 18)
    job.run(script)
    reports = [report for _, report in job.reports]
    hidden = sum(report.hidden_seconds for report in reports)
    assert 0 < hidden <= sum(report.compute_seconds for report in reports)


def test_time_in_flight_is_from_the_first_beginning_to_the_end() -> None:
    clock = ManualClock(0.0)
    timer = InFlightTimer(clock)
    timer.stop()
    timer.start()
    clock.advance(2)
    timer.start()
    clock.advance(1)
    assert timer.seconds == 0
    timer.stop()
    clock.advance(5)
    timer.start()
    clock.advance(1)
    timer.stop()
    assert timer.seconds == 4


def test_a_trace_is_lines_of_json_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(3.0)
    trace = GradientTrace(str(tmp_path / "t"), clock, rank=2)
    trace("gradient", clock=1, parameter="a")
    clock.advance(1)
    trace("push-bytes-left", clock=1, shard=0)
    trace.flush()
    trace.flush()
    assert [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()] == [
        {"time": 3.0, "rank": 2, "event": "gradient", "clock": 1, "parameter": "a"},
        {"time": 4.0, "rank": 2, "event": "push-bytes-left", "clock": 1, "shard": 0},
    ]
    monkeypatch.delenv("PSCTL_TRACE", raising=False)
    assert from_environment(0) is None


def test_each_rank_may_have_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSCTL_TRACE", str(tmp_path / "trace-{rank}.jsonl"))
    trace = from_environment(3)
    assert trace is not None
    trace("gradient", clock=0, parameter="a")
    trace.flush()
    assert (tmp_path / "trace-3.jsonl").exists()
