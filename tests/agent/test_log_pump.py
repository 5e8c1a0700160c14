"""What processes print: into files, struck of secrets, a limited part passed on."""

from __future__ import annotations

import json
import os
import queue
from pathlib import Path

import pytest

from psctl.agent.log_files import RESERVED
from psctl.agent.log_pump import LONGEST, RATE, LogPump
from psctl.job.process_messages import OutputLines
from psctl.launch.remote_programs import host_state
from psctl.process.secret_masking import Secrets
from psctl.types import Member
from tests.helpers.disks import SmallDisk

WORKER = Member("worker", 1)


class PumpedLog:
    """A pump with what it said."""

    def __init__(self, folder: Path, *secrets: str, limit: int = 10**9) -> None:
        self.said: queue.SimpleQueue[OutputLines] = queue.SimpleQueue()
        self.troubles: list[str] = []
        self.pump = LogPump(folder, limit, Secrets(secrets), self.said.put, self.troubles.append)
        self.path = folder / "worker-1.stderr.log"
        source, self.end = os.pipe()
        self.pump.add(WORKER, "stderr", source)

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
    pumped = PumpedLog(tmp_path)
    assert pumped.printed("one\nzwei ü\nno end".encode()) == ["one", "zwei ü", "no end"]
    assert pumped.path.read_text() == "one\nzwei ü\nno end\n"
    assert pumped.passed_on() == ["one", "zwei ü", "no end"]
    assert pumped.path.stat().st_mode & 0o777 == 0o600


def test_a_secret_is_struck_out_also_where_it_is_cut_by_a_read(tmp_path: Path) -> None:
    pumped = PumpedLog(tmp_path, "hunter22", "abc")
    os.write(pumped.end, b"key hun")
    pumped.pump.drain(WORKER)
    pumped.printed(b"ter22 abc\n")
    assert pumped.path.read_text() == "key *** abc\n"  # three letters are no secret worth it
    assert pumped.passed_on() == ["key *** abc"]


def test_a_progress_bar_passes_on_what_is_seen_last(tmp_path: Path) -> None:
    pumped = PumpedLog(tmp_path)
    pumped.printed(b"10%\r50%\r100%\r\nbytes \xff\n")
    assert pumped.passed_on() == ["100%", "bytes \ufffd"]
    assert pumped.path.read_bytes() == b"10%\r50%\r100%\r\nbytes \xff\n"


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    pumped = PumpedLog(tmp_path)
    os.write(pumped.end, b"x" * (LONGEST - 100))
    pumped.pump.drain(WORKER)
    pumped.printed(b"x" * 1000)
    assert pumped.path.stat().st_size > LONGEST
    assert all(len(line) <= 4096 for line in pumped.passed_on())


def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch, RESERVED + 8)
    pumped = PumpedLog(tmp_path)
    os.write(pumped.end, b"one\ntwo\n")
    pumped.pump.drain(WORKER)
    os.write(pumped.end, b"three\n")
    pumped.pump.drain(WORKER)
    os.write(pumped.end, b"four\n")
    assert pumped.pump.drain(WORKER) == ["one", "two", "three", "four"]
    assert pumped.troubles == ["the log of worker/1 (stderr) cannot be written: the disk is full"]
    full = "psctl: lines from here on are not kept, the disk is full"
    assert pumped.path.read_text().splitlines() == ["one", "two", full]
    disk.room = 1000
    os.write(pumped.end, b"five\n")
    pumped.pump.drain(WORKER)
    disk.room = 0
    pumped.printed(b"x" * 600 + b"\nsix\n")
    missing = "psctl: 2 lines were not kept, the disk was full"
    assert pumped.path.read_text().splitlines() == ["one", "two", full, missing, "five", full, missing]
    said = []
    while not pumped.said.empty():
        said.append(pumped.said.get())
    assert [line for each in said for line in each.lines] == ["one", "two", "three", "four", "five", "x" * 600, "six"]
    assert sum(each.unwritten for each in said) == 4


def test_a_folder_that_takes_no_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("this is no folder")
    pumped = PumpedLog(tmp_path / "logs")
    assert pumped.printed(b"one\n") == ["one"]
    assert len(pumped.troubles) == 1


def test_the_newest_lines_of_a_rank_are_kept_within_its_limit(tmp_path: Path) -> None:
    """Two streams share the limit; segments are named by the number of their first line."""
    folder = tmp_path / "logs"
    pumped = PumpedLog(folder, limit=1_000_000)
    source, errors = os.pipe()
    pumped.pump.add(WORKER, "stdout", source)
    lines = [f"line {number:09}" for number in range(200_000)]  # 3 MB
    with os.fdopen(errors, "w") as printing:
        printing.write("to stdout\n")
    with os.fdopen(pumped.end, "w", closefd=False) as printing:
        for start in range(0, len(lines), 1000):
            printing.write("\n".join(lines[start : start + 1000]) + "\n")
            printing.flush()
            pumped.pump.drain(WORKER)
            assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_000_000
    pumped.printed(b"")
    assert (folder / "worker-1.stdout.log").read_text() == "to stdout\n"
    found = list(host_state.logs({"folder": str(tmp_path), "prefixes": ["worker-1."], "grep": None}))
    rows = [json.loads(row) for row in found]
    name = "worker-1.stderr.log"
    assert rows[-1] == ["worker-1.stdout.log", "to stdout"]
    first = rows[0][1]
    assert 200_000 - 1_000_000 // 15 <= first <= 200_000 - 800_000 // 15
    assert rows[0][0] == name
    assert [row[1] for row in rows[1:-1]] == lines[first:]
    tail = list(host_state.logs({"folder": str(tmp_path), "prefixes": ["worker-1.stderr"], "tail": 20_000}))
    assert [json.loads(row)[1] for row in tail[1:]] == lines[-20_000:], "across segments"


def test_a_rank_that_is_started_again_continues_in_its_file(tmp_path: Path) -> None:
    pumped = PumpedLog(tmp_path)
    pumped.printed(b"one\n")
    source, pumped.end = os.pipe()
    pumped.pump.add(WORKER, "stderr", source)
    pumped.printed(b"two\n")
    assert pumped.path.read_text() == "one\ntwo\n"


def test_100_000_printed_lines_are_sent_in_a_few_messages_and_kept_whole(tmp_path: Path) -> None:
    pumped = PumpedLog(tmp_path)
    lines = [f"line {number}" for number in range(100_000)]
    with os.fdopen(pumped.end, "w", closefd=False) as printing:
        printing.write("\n".join(lines) + "\n")
    assert pumped.printed(b"last\n")[-1] == "last"
    assert pumped.path.read_text().splitlines() == [*lines, "last"]
    said = []
    while not pumped.said.empty():
        said.append(pumped.said.get())
    assert len(said) <= 20
    assert sum(len(each.lines) + each.dropped for each in said) == 100_001
    assert sum(len(each.lines) for each in said) <= 2 * RATE + 5 * RATE
