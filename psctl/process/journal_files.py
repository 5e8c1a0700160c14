"""The files of a coordinator's journal: a snapshot that is replaced as a whole, and the records since.

Written by the coordinator (coordinator/journal.py), and by the agent of the standby, which has a copy
(agent/replica.py).
`coordinator.snapshot` names its journal by a number; `coordinator.journal.N` has the records, each with its length and
checksum. A write without fsync outlasts a killed process, not a host without power: then the other copy is used.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

SNAPSHOT = "coordinator.snapshot"

JOURNAL = "coordinator.journal"

_HEAD = 8  # bytes: length and checksum of what follows


class JournalFiles:
    """Writes the files of one journal.

    Args:
        folder: the job's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = -1
        self._file = -1

    @property
    def is_open(self) -> bool:
        """Whether records are written."""
        return self._file >= 0

    def begin(self, number: int, snapshot: bytes) -> None:
        """Replace what is there by a framed snapshot, with no records yet.

        Raises:
            OSError: the disk is full or broken; nothing is there then.
        """
        path, new = self._folder / SNAPSHOT, self._folder / f"{SNAPSHOT}.new"
        try:
            file = os.open(journal_path(self._folder, number), _FLAGS, 0o600)
            try:
                new.touch(0o600)
                new.write_bytes(snapshot)
                new.replace(path)
            except OSError:
                os.close(file)
                raise
        except OSError:
            self.remove()
            raise
        if self._file >= 0:
            os.close(self._file)
        if self._number != number:
            journal_path(self._folder, self._number).unlink(missing_ok=True)
        self._number, self._file = number, file

    def append(self, record: bytes) -> None:
        """Add a framed record.

        Raises:
            OSError: the disk is full or broken; nothing is there then: a part of the records is worth nothing.
        """
        try:
            written = os.write(self._file, record)
        except OSError:
            self.remove()
            raise
        if written < len(record):
            self.remove()
            raise OSError(f"{written} of {len(record)} bytes were written")

    def remove(self) -> None:
        """Remove the files."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for name in (SNAPSHOT, f"{SNAPSHOT}.new"):
            (self._folder / name).unlink(missing_ok=True)
        for path in self._folder.glob(f"{JOURNAL}.*"):
            with contextlib.suppress(OSError):
                path.unlink()


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


def journal_path(folder: Path, number: int) -> Path:
    """Return the path of the journal with this number."""
    return folder / f"{JOURNAL}.{number}"


def framed(data: bytes) -> bytes:
    """Return a record with its length and checksum."""
    return len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def unframed(data: bytes) -> Iterator[bytes]:
    """Yield the records that are whole, up to the first that is not: the writer was killed while it wrote that."""
    at = 0
    while at + _HEAD <= len(data):
        size, check = (int.from_bytes(data[at + each : at + each + 4], "little") for each in (0, 4))
        at += _HEAD
        record = data[at : at + size]
        if len(record) < size or zlib.crc32(record) != check:
            return
        yield record
        at += size
