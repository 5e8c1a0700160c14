"""Every event survives being a line of JSON, and says what is promised."""

from __future__ import annotations

import json

from psctl.job import events


def test_an_event_is_one_line_and_comes_back() -> None:
    event = events.Progress(
        time=1.5, step=3, epoch=0, metrics={"loss": 0.5}, examples_per_second=10.0, bytes_per_second=1.0,
        sync_seconds=0.1, compute_seconds=0.2, staleness=0,
    )  # fmt: skip
    line = events.to_line(event)
    assert line.count(b"\n") == 1
    assert events.from_line(line) == event
    assert json.loads(line)["event"] == "progress"


def test_the_end_of_a_job_whose_coordinator_was_killed_is_a_failure_like_any_other() -> None:
    last = events.finished_by_failure(2.0, "the head lost power")
    assert json.loads(events.to_line(last)) == {
        "event": "finished", "time": 2.0, "status": "failed", "exit": 1, "steps": 0, "seconds": 0.0, "metrics": {},
        "failure": {"exception": "the head lost power"},
    }  # fmt: skip
