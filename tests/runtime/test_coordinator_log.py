"""The event log on a disk that is full: no torn line, nothing lost, room for the last words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from psctl.job import events
from psctl.job.messages import Failure
from psctl.runtime import keeper
from psctl.runtime.coordinator_log import EventLog


class FullDisk:
    """os.write as a disk with `room` bytes left behaves; giving up the kept file makes room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(descriptor, data[: self.room])
        self.room -= taken
        return taken


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


def test_a_line_that_does_not_fit_is_not_left_torn_and_comes_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl.kept").unlink()  # a disk so full that there never was any
    log.append(notice("one"))
    disk = FullDisk(20)
    monkeypatch.setattr(os, "write", disk)
    log.append(notice("two"))
    log.append(notice("three"))
    assert read(tmp_path / "events.jsonl") == [notice("one")]
    disk.room = 1000
    assert log.flush()
    assert read(tmp_path / "events.jsonl") == [notice("one"), notice("two"), notice("three")]


def test_room_is_kept_for_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    disk = FullDisk(10)
    monkeypatch.setattr(os, "write", disk)
    monkeypatch.setattr(Path, "unlink", lambda path, **_: (os.unlink(path), setattr(disk, "room", 1000))[0])
    log.append(notice("the end"))
    assert read(tmp_path / "events.jsonl") == [notice("the end")]


def test_the_keeper_gives_a_log_its_end_once_and_cuts_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        events.to_line(events.Started(time=5.0, job="digits-3", hosts=["h0"], roles=[]))
        + events.to_line(events.State(time=6.0, role="worker", rank=0, host="h0", state="running"))
        + events.to_line(events.CheckpointWritten(time=7.0, step=500, path="/c", bytes=8, seconds=0.1))
        + b'{"event": "prog'
    )
    failure = Failure("agent/0", "h0", -9, 9.0, 0, "psctl's agent on the head died", [], [])
    assert keeper.write_finished(tmp_path, "digits-3", failure)
    assert not keeper.write_finished(tmp_path, "digits-3", failure)
    last = read(path)[-1]
    assert isinstance(last, events.Finished)
    assert (last.status, last.exit, last.seconds) == ("failed", 1, 4.0)
    assert last.failure is not None
    assert last.failure["checkpoint"] == "digits-3@500"
    assert last.failure["stopped"] == ["worker/0"]
