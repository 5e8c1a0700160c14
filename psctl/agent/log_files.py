"""The log files of one rank on one host: one file per stream, in segments; a limit keeps only the newest segments.

    worker-3.stdout.log            the first lines of the stream
    worker-3.stdout.81920.log      the lines from line 81,920 on, counted from 0

A new segment is started when the last one has an eighth of the limit. A full disk raises no error here: lines that do
not fit are counted, and the file reports their number in space that is reserved for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from psctl.process.reserved_file import ReservedFile

PARTS = 8
"""Segments that fit into the limit of a rank."""

RESERVED = 512
"""Bytes of a segment that are reserved for lines which report missing lines."""


class RankLogs:
    """All log files of one rank on a host.

    Args:
        folder: the folder of the files.
        rank: prefix of the files' names, such as "worker-3".
        limit: bytes of all files together.
    """

    def __init__(self, folder: Path, rank: str, limit: int) -> None:
        self.folder = folder
        self.rank = rank
        self._limit = limit
        self._streams: dict[str, StreamLog] = {}
        self._ended: list[tuple[Path, int]] = []  # finished segments and their bytes, oldest first

    def stream(self, name: str) -> StreamLog:
        """Return the log of one stream; it is the same for every start of the rank."""
        if name not in self._streams:
            self._streams[name] = StreamLog(self, name)
        return self._streams[name]

    @property
    def segment_size(self) -> int:
        """Bytes after which a new segment is started."""
        return self._limit // PARTS

    def on_segment_ended(self, path: Path, size: int) -> None:
        """Add a finished segment of `size` bytes."""
        self._ended.append((path, size))

    def remove_oldest(self, size: int) -> None:
        """Remove the oldest segments until `size` more bytes fit the limit."""
        held = sum(stream.size for stream in self._streams.values()) + sum(size for _, size in self._ended)
        while self._ended and held + size > self._limit:
            path, freed = self._ended.pop(0)
            held -= freed
            with contextlib.suppress(OSError):  # already removed
                path.unlink()


class StreamLog:
    """The log of one stream of a rank."""

    def __init__(self, rank: RankLogs, name: str) -> None:
        self._rank = rank
        self._name = name
        self._file: ReservedFile | None = None
        self._path = rank.folder / f"{rank.rank}.{name}.log"
        self._count = 0  # lines that were printed
        self._missing = 0  # lines that were not written and that the file does not report yet

    @property
    def size(self) -> int:
        """Bytes of the current segment."""
        return self._file.size if self._file is not None else 0

    def write(self, data: bytes, lines: int) -> bool:
        """Append whole lines; return False when the disk is full."""
        if self._file is not None and self.size and self.size + len(data) > self._rank.segment_size:
            self._end_segment()
        self._rank.remove_oldest(len(data))
        written = self._on_disk(lambda file: file.append(self._missing_lines() + data, RESERVED))
        self._count += lines
        if written:
            self._missing = 0
            return True
        if not self._missing:
            self._on_disk(lambda file: file.append(b"psctl: lines from here on are not kept, the disk is full\n"))
        self._missing += lines
        return False

    def close(self) -> None:
        """Close the file; a later start of the rank continues it with a new write."""
        if self._file is not None:
            if self._on_disk(lambda file: file.append(self._missing_lines())):
                self._missing = 0
            self._file.close()
            self._file = None

    def _missing_lines(self) -> bytes:
        return b"psctl: %d lines were not kept, the disk was full\n" % self._missing if self._missing else b""

    def _end_segment(self) -> None:
        assert self._file is not None, "a segment is open"
        size = self.size
        self.close()
        self._rank.on_segment_ended(self._path, size)
        self._path = self._rank.folder / f"{self._rank.rank}.{self._name}.{self._count}.log"

    def _on_disk(self, work: Callable[[ReservedFile], bool]) -> bool:
        """Call `work` with the file, which is opened first if needed; return False when the disk is full."""
        try:
            if self._file is None:
                os.makedirs(self._rank.folder, exist_ok=True)
                self._file = ReservedFile(self._path, RESERVED)
            return work(self._file)
        except OSError:
            return False
