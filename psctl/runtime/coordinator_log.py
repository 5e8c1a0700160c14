"""The job's event log: lines appended to one file, each in one write, for everyone to follow.

The disk may be full. A line that does not fit is not left torn; it waits, in order, until there is room, and for the
last ones room is kept: a small file that is given up when the disk refuses for the first time.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

from psctl.job import events

ROOM = 256 << 10
"""Bytes kept for the end of a log whose disk is full."""

WAITING = 10_000
"""Lines that wait at most; then the oldest lines that processes printed are left out (their host's log has them)."""


class EventLog:
    """Appends events. OSError from the constructor: the disk refuses from the start."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._kept = path.with_name(path.name + ".kept")
        self._waiting: deque[bytes] = deque()
        with contextlib.suppress(OSError):
            self._kept.write_bytes(bytes(ROOM))

    def append(self, event: events.AnyEvent) -> None:
        """Write an event, behind those that wait."""
        if len(self._waiting) >= WAITING and isinstance(event, events.Log):
            return
        self._waiting.append(events.to_line(event))
        self.flush()

    def flush(self) -> bool:
        """Write what waits, as far as the disk takes it; return whether all is written."""
        while self._waiting:
            if not self._write(self._waiting[0]):
                if not self._kept.exists():
                    return False
                self._kept.unlink()
                continue
            self._waiting.popleft()
        return True

    def close(self) -> None:
        """Give the kept room back, and write what it makes room for."""
        with contextlib.suppress(OSError):
            self._kept.unlink(missing_ok=True)
        self.flush()
        os.close(self._file)

    def _write(self, line: bytes) -> bool:
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) == len(line):
                return True
        except OSError:
            return False
        os.ftruncate(self._file, before)
        return False
