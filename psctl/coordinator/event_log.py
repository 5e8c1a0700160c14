"""The job's event log: lines appended to one file, each in one write, for everyone to follow.

The disk may be full. Room beyond the file's end is reserved while there is some: printed lines must leave all of it,
progress a quarter, and everything else may use it up; what does not fit even then waits, in order, until there is room.
Printed lines are bounded at all times, for a log that is replayed must not grow by what a script prints in weeks: half
of their limit at any rate, the rest ever more slowly. What is left out of them is told in their place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from psctl.job import events
from psctl.process.reserved_file import ReservedFile

ROOM = 1 << 20
"""Bytes reserved: an hour of progress, and all that is told besides."""

WAITING = 10_000
"""Events that wait at most; then progress is left out."""

PRINTED = 256 << 20
"""Bytes of printed lines at most."""

SPREAD = 7 * 86400.0
"""Seconds over which what is left of the second half of that is given out."""


class EventLog:
    """Appends events. OSError from the constructor: the disk refuses from the start.

    Args:
        path: the file.
        limit: bytes of printed lines, if that is less than PRINTED.
        now: seconds, of a clock that never goes back.
    """

    def __init__(self, path: Path, limit: int = PRINTED, now: Callable[[], float] = time.monotonic) -> None:
        self._file = ReservedFile(path, ROOM)
        self._folder, self._now = path.parent, now
        self._waiting: deque[bytes] = deque()
        self._limit = min(limit, PRINTED)
        self._printed, self._allowed, self._since = 0, self._limit / 2, now()
        self._left_out: dict[tuple[str, str], int] = {}  # printed lines, by rank and stream
        self._full = False

    def append(self, event: events.AnyEvent) -> None:
        """Write an event, behind those that wait; a printed line and progress only if there is room now."""
        if isinstance(event, events.Log):
            self._append_printed(event)
            return
        if isinstance(event, events.Progress) and (len(self._waiting) >= WAITING or self._is_short(ROOM // 4)):
            return
        if isinstance(event, events.Finished):
            for (rank, stream), count in self._left_out.items():
                self._waiting.append(_gap(event.time, rank, stream, count))
        self._waiting.append(events.to_line(event))
        self.flush()

    def flush(self) -> bool:
        """Write what waits, as far as the disk takes it; return whether all is written."""
        while self._waiting:
            if not self._file.append(self._waiting[0], ROOM) and not self._file.append(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def close(self) -> None:
        """Write what waits, and give the room beyond it back."""
        self.flush()
        self._file.close()

    def _is_short(self, spare: int) -> bool:
        """Has the disk less room for us than that?"""
        return not self._file.has_room(ROOM) and not self._file.has_room(spare)

    def _append_printed(self, event: events.Log) -> None:
        data = events.to_line(event)
        who = (event.rank, event.stream)
        if who in self._left_out:
            data = _gap(event.time, *who, self._left_out[who]) + data
        allowed = self._may_print(len(data))
        if allowed and self.flush() and self._file.append(data, ROOM):
            self._left_out.pop(who, None)
            self._printed += len(data)
            self._allowed -= len(data)
            self._full = False
            return
        self._left_out[who] = self._left_out.get(who, 0) + 1
        if allowed and not self._full:
            self._full = True
            self._tell_full(event.time)

    def _may_print(self, size: int) -> bool:
        """Is there so much left of the limit now?"""
        left, now = self._limit - self._printed, self._now()
        self._allowed = min(left, self._allowed + (now - self._since) * left / SPREAD)
        self._since = now
        return size <= self._allowed

    def _tell_full(self, when: float) -> None:
        text = (
            f"the head's disk is full ({self._folder}): lines that processes print are not shown until there is room; "
            "training goes on"
        )
        self.append(events.Notice(time=when, text=text))


def _gap(when: float, rank: str, stream: str, count: int) -> bytes:
    text = f"... {count} lines left out here; see `psctl logs`"
    return events.to_line(events.Log(time=when, rank=rank, stream=stream, text=text))
