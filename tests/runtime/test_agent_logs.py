"""What processes print: into files, struck of secrets, a limited part passed on."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from psctl.job.messages import Lines
from psctl.runtime.logs import LONGEST, RATE, Pump, Secrets
from psctl.words import Member

WORKER = Member("worker", 1)


class Desk:
    """A pump with what it said."""

    def __init__(self, folder: Path, *secrets: str) -> None:
        self.said: queue.SimpleQueue[Lines] = queue.SimpleQueue()
        self.troubles: list[str] = []
        self.pump = Pump(Secrets(secrets), self.said.put, self.troubles.append)
        self.path = folder / "worker-1.stderr.log"
        source, self.end = os.pipe()
        self.pump.add(WORKER, "stderr", source, self.path)

    def printed(self, data: bytes) -> list[str]:
        """Print and end; return the last lines."""
        os.write(self.end, data)
        os.close(self.end)
        tail = self.pump.drain(WORKER)
        self.pump.close(WORKER)
        return tail

    def passed_on(self) -> list[str]:
        found = []
        while not self.said.empty():
            found += self.said.get().lines
        return found


def test_lines_reach_the_file_the_followers_and_the_account(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.printed("one\nzwei ü\nno end".encode()) == ["one", "zwei ü", "no end"]
    assert desk.path.read_text() == "one\nzwei ü\nno end\n"
    assert desk.passed_on() == ["one", "zwei ü", "no end"]
    assert desk.path.stat().st_mode & 0o777 == 0o600


def test_a_secret_is_struck_out_also_where_it_is_cut_by_a_read(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "hunter22", "abc")
    os.write(desk.end, b"key hun")
    desk.pump.drain(WORKER)
    desk.printed(b"ter22 abc\n")
    assert desk.path.read_text() == "key *** abc\n"  # three letters are no secret worth it
    assert desk.passed_on() == ["key *** abc"]


def test_a_progress_bar_passes_on_what_is_seen_last(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.printed(b"10%\r50%\r100%\r\nbytes \xff\n")
    assert desk.passed_on() == ["100%", "bytes \ufffd"]
    assert desk.path.read_bytes() == b"10%\r50%\r100%\r\nbytes \xff\n"


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    os.write(desk.end, b"x" * (LONGEST - 100))
    desk.pump.drain(WORKER)
    desk.printed(b"x" * 1000)
    assert desk.path.stat().st_size > LONGEST
    assert all(len(line) <= 4096 for line in desk.passed_on())


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    os.close(desk.end)
    source, desk.end = os.pipe()
    (tmp_path / "full").symlink_to("/dev/full")
    desk.pump.add(Member("worker", 2), "stderr", source, tmp_path / "full")
    os.write(desk.end, b"one\ntwo\n")
    desk.pump.drain(Member("worker", 2))
    os.write(desk.end, b"three\n")
    os.close(desk.end)
    assert desk.pump.drain(Member("worker", 2)) == ["one", "two", "three"]
    assert desk.troubles == ["the log of worker/2 (stderr) cannot be written: No space left on device"]
    assert desk.passed_on() == ["one", "two", "three"]


def test_a_process_that_prints_100_000_lines_is_told_in_a_few_messages_and_kept_whole(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    lines = [f"line {number}" for number in range(100_000)]
    with os.fdopen(desk.end, "w", closefd=False) as printing:
        printing.write("\n".join(lines) + "\n")
    assert desk.printed(b"last\n")[-1] == "last"
    assert desk.path.read_text().splitlines() == [*lines, "last"]
    said = []
    while not desk.said.empty():
        said.append(desk.said.get())
    assert len(said) <= 20
    assert sum(len(each.lines) + each.dropped for each in said) == 100_001
    assert sum(len(each.lines) for each in said) <= 2 * RATE + 5 * RATE
