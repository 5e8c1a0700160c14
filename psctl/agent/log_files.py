"""The log files of one rank on one host: a file a stream, in segments, of which the newest are kept within a limit.

    worker-3.stdout.log            the first lines of the stream
    worker-3.stdout.81920.log      those from line 81,920 on, counted from 0: what was printed before is known by it

A segment begins when one has an eighth of the limit. Nothing here raises on a disk that is full: lines that do not fit
are counted, and the file says so in room that is reserved for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from psctl.process.reserved_file import ReservedFile

PARTS = 8
"""Segments that the limit of a rank holds."""

ROOM = 512
"""Bytes of a segment that are reserved for the lines which say that others are missing."""


class RankLogs:
    """All log files of one rank on a host.

    Args:
        folder: where they lie.
        rank: how their names begin, such as "worker-3".
        limit: bytes of all of them together.
    """

    def __init__(self, folder: Path, rank: str, limit: int) -> None:
        self.folder, self.rank, self._limit = folder, rank, limit
        self._streams: dict[str, StreamLog] = {}
        self._ended: list[tuple[Path, int]] = []  # segments that are not written any more, oldest first

    def stream(self, name: str) -> StreamLog:
        """Return the log of one stream; the same one for every start of the rank."""
        if name not in self._streams:
            self._streams[name] = StreamLog(self, name)
        return self._streams[name]

    @property
    def segment(self) -> int:
        """Bytes after which a segment ends."""
        return self._limit // PARTS

    def ended(self, path: Path, size: int) -> None:
        """Take in a segment that is not written any more."""
        self._ended.append((path, size))

    def make_room(self, size: int) -> None:
        """Remove the oldest segments until `size` more bytes fit the limit."""
        held = sum(stream.size for stream in self._streams.values()) + sum(size for _, size in self._ended)
        while self._ended and held + size > self._limit:
            path, freed = self._ended.pop(0)
            held -= freed
            with contextlib.suppress(OSError):  # somebody removed it before
                path.unlink()


class StreamLog:
    """What one stream of a rank printed."""

    def __init__(self, rank: RankLogs, name: str) -> None:
        self._rank, self._name = rank, name
        self._file: ReservedFile | None = None
        self._path = rank.folder / f"{rank.rank}.{name}.log"
        self._count = 0  # of lines that were printed
        self._missing = 0  # lines that were not written and are not told of in the file

    @property
    def size(self) -> int:
        """Bytes of the segment that is written."""
        return self._file.size if self._file is not None else 0

    def write(self, data: bytes, lines: int) -> bool:
        """Append whole lines; False when the disk does not take them."""
        if self._file is not None and self.size and self.size + len(data) > self._rank.segment:
            self._end_segment()
        self._rank.make_room(len(data))
        written = self._on_disk(lambda file: file.append(self._missing_lines() + data, ROOM))
        self._count += lines
        if written:
            self._missing = 0
            return True
        if not self._missing:
            self._on_disk(lambda file: file.append(b"psctl: lines from here on are not kept, the disk is full\n"))
        self._missing += lines
        return False

    def close(self) -> None:
        """The rank prints no more, until it is started again."""
        if self._file is not None:
            if self._on_disk(lambda file: file.append(self._missing_lines())):
                self._missing = 0
            self._file.close()
            self._file = None

    def _missing_lines(self) -> bytes:
        return b"psctl: %d lines were not kept, the disk was full\n" % self._missing if self._missing else b""

    def _end_segment(self) -> None:
        assert self._file is not None, "a segment that has begun"
        size = self.size
        self.close()
        self._rank.ended(self._path, size)
        self._path = self._rank.folder / f"{self._rank.rank}.{self._name}.{self._count}.log"

    def _on_disk(self, work: Callable[[ReservedFile], bool]) -> bool:
        """Do something with the file, which is opened when it is not; False when the disk refuses."""
        try:
            if self._file is None:
                os.makedirs(self._rank.folder, exist_ok=True)
                self._file = ReservedFile(self._path, ROOM)
            return work(self._file)
        except OSError:
            return False
