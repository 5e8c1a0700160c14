"""The event log on a disk that is full: no torn line, nothing lost but printed lines, room for the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from psctl.agent import supervisor
from psctl.coordinator.event_log import RESERVE_BYTES, EventLog
from psctl.job import events
from psctl.job.process_messages import ProcessFailure
from tests.helpers.disks import SmallDisk


def notice(text: str) -> events.Notice:
    return events.Notice(time=1.0, text=text)


def read(path: Path) -> list[events.AnyEvent]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [events.from_line(line) for line in data.splitlines()]


def test_events_are_lines_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(notice("one"))
    log.append(notice("two"))
    log.close()
    assert read(tmp_path / "events.jsonl") == [notice("one"), notice("two")]
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def printed(text: str) -> events.Log:
    return events.Log(time=1.0, rank="worker/1", stream="stdout", text=text)


def progress(step: int) -> events.Progress:
    return events.Progress(
        time=1.0, step=step, epoch=0, metrics={}, examples_per_second=0.0, bytes_per_second=0.0, sync_seconds=0.0,
        compute_seconds=0.0, staleness=0,
    )  # fmt: skip


def finished() -> events.Finished:
    return events.Finished(time=1.0, status="stopped", exit=1, steps=9, seconds=1.0, metrics={})


def test_a_line_that_does_not_fit_is_not_left_torn_and_comes_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 60, reserves=False)
    log = EventLog(tmp_path / "events.jsonl")
    for text in ("one", "two", "three"):
        log.append(notice(text))
    assert read(tmp_path / "events.jsonl") == [notice("one")]
    disk.room = 1000
    assert log.flush()
    assert read(tmp_path / "events.jsonl") == [notice("one"), notice("two"), notice("three")]


def test_on_a_full_disk_all_events_but_printed_lines_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's output has filled the disk; what the job does is still followed, and its end is in the log."""
    disk = SmallDisk(monkeypatch, RESERVE_BYTES + 500)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(100):
        log.append(printed(f"line {number}"))
    found = read(tmp_path / "events.jsonl")
    shown = [event for event in found if isinstance(event, events.Log)]
    assert 0 < len(shown) < 100
    (told,) = [event for event in found if isinstance(event, events.Notice)]
    assert "the head's disk is full" in told.text
    for step in range(20_000):
        log.append(progress(step))
    steps = [event.step for event in read(tmp_path / "events.jsonl") if isinstance(event, events.Progress)]
    assert steps == list(range(len(steps)))
    assert 3_000 < len(steps) < 20_000
    for number in range(1000):
        log.append(notice(f"{number}"))
    log.append(finished())
    *_, gap, last = read(tmp_path / "events.jsonl")
    assert last == finished()
    assert gap == printed(f"... {100 - len(shown)} lines left out here; see `psctl logs`")
    disk.room = 2 * RESERVE_BYTES
    log.append(printed("there is room"))
    assert read(tmp_path / "events.jsonl")[-1] == printed("there is room")


def test_printed_lines_are_bounded_and_never_end(tmp_path: Path) -> None:
    """Half of the limit at any rate, then ever less; what is left out is said before what comes next."""
    now = [0.0]
    limit = 100_000
    log = EventLog(tmp_path / "events.jsonl", limit, lambda: now[0])
    shown = []
    for day in range(60):
        for number in range(2000):
            now[0] = 86400 * (day + number / 2000)
            log.append(printed(f"line {day} {number}"))
        size = (tmp_path / "events.jsonl").stat().st_size
        assert size <= limit
        found = read(tmp_path / "events.jsonl")
        shown.append(len(found) - sum(shown))
    assert shown[0] > 400, "half of the limit came at once"
    assert all(shown[1:20])
    told = [event.text for event in found if isinstance(event, events.Log)]
    left_out = sum(int(text.split()[1]) for text in told if text.startswith("..."))
    lines = sum(not text.startswith("...") for text in told)
    log.append(finished())
    *_, gap, _ = read(tmp_path / "events.jsonl")
    assert isinstance(gap, events.Log)
    assert lines + left_out + int(gap.text.split()[1]) == 60 * 2000


def test_the_supervisor_gives_a_log_its_end_once_and_cuts_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        events.to_line(events.Started(time=5.0, job="digits-3", hosts=["h0"], roles=[]))
        + events.to_line(events.StateChanged(time=6.0, role="worker", rank=0, host="h0", state="running"))
        + events.to_line(events.CheckpointWritten(time=7.0, step=500, path="/c", bytes=8, seconds=0.1))
        + b'{"event": "prog'
    )
    failure = ProcessFailure("agent/0", "h0", -9, 9.0, 0, "psctl's agent on the head was lost")
    assert supervisor.write_finished(tmp_path, "digits-3", failure)
    assert not supervisor.write_finished(tmp_path, "digits-3", failure)
    last = read(path)[-1]
    assert isinstance(last, events.Finished)
    assert (last.status, last.exit, last.seconds) == ("failed", 1, 4.0)
    assert last.failure is not None
    assert last.failure["checkpoint"] == "digits-3@500"
    assert last.failure["stopped"] == ["worker/0"]
