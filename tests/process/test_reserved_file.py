"""Files with reserved room: on a real file system, on one that is full, and on one that reserves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psctl.process.reserved_file import ReservedFile
from psctl.process.stderr_log import OwnLog
from tests.helpers.disks import SmallDisk


def test_room_is_allocated_beyond_the_end_and_given_back(tmp_path: Path) -> None:
    file = ReservedFile(tmp_path / "log", 1 << 20)
    assert file.append(b"one\n", 1 << 20)
    found = (tmp_path / "log").stat()
    assert (found.st_size, found.st_mode & 0o777) == (4, 0o600)
    if found.st_blocks * 512 < 1 << 20:
        pytest.skip("this file system reserves nothing")
    file.close()
    assert (tmp_path / "log").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "log").read_bytes() == b"one\n"


def test_what_must_leave_room_is_refused_and_the_last_lines_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 1000)
    file = ReservedFile(tmp_path / "log", 600)
    assert file.append(b"a" * 400, 600)
    assert not file.append(b"b", 600), "the disk is full"
    assert file.append(b"c" * 600), "the room was there"
    assert not file.append(b"d")
    disk.room = 1000
    assert file.append(b"e", 600)
    assert (tmp_path / "log").read_bytes() == b"a" * 400 + b"c" * 600 + b"e"


def test_without_reservations_nothing_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch, 5, reserves=False)
    file = ReservedFile(tmp_path / "log", 600)
    assert file.append(b"one\n", 600)
    assert not file.append(b"two\n", 600)
    disk.room = 4
    assert file.append(b"two\n", 600)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_the_agents_own_log_never_raises_and_counts_missing_lines(tmp_path: Path) -> None:
    full, path = os.open("/dev/full", os.O_WRONLY), tmp_path / "agent.log"
    log = OwnLog(full)
    print("one", file=log, flush=True)
    with path.open("wb") as file:
        os.dup2(file.fileno(), full)
    print("two", file=log, flush=True)
    os.close(full)
    assert path.read_text() == "(the disk was full: 4 bytes are missing here)\ntwo\n"
