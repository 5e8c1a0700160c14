"""The event log of a job: lines appended to one file, each in one write, so that readers can follow it.

The disk may be full. Space beyond the file's end is reserved while there is some. Printed lines must leave the whole
reserve free, progress events a quarter of it, and all other events may use it up; an event that does not fit even then
waits, in order, until there is space. Printed lines are bounded, since a log that is replayed must not grow with weeks
of a script's output: half of the limit is available at once, the rest at a falling rate. A line that states the number
of omitted lines replaces them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path

from psctl.job import events
from psctl.process.reserved_file import ReservedFile

RESERVE_BYTES = 1 << 20
"""Bytes reserved: an hour of progress events and all other events of that time."""

WAITING = 10_000
"""Most events that wait; beyond it progress events are omitted."""

PRINTED = 256 << 20
"""Most bytes of printed lines."""

LAST = 4 << 20
"""Bytes of the file's end that hold all events of one input."""

SPREAD = 7 * 86400.0
"""Seconds over which the remainder of the second half of that limit is released."""


class WrittenEvents:
    """Lines of an event log, of which each stands for one event: a process may print the same twice at one time."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = Counter(lines)

    def take(self, event: events.AnyEvent) -> bool:
        """Return whether an event is there; its line stands for no further one then."""
        line = events.to_line(event)
        found = self._lines[line] > 0
        self._lines[line] -= found
        return found


class EventLog:
    """Appends events to the log file.

    Args:
        path: the file.
        limit: bytes of printed lines, if that is less than PRINTED.
        now: monotonic clock, in seconds.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, limit: int = PRINTED, now: Callable[[], float] = time.monotonic) -> None:
        self._file = ReservedFile(path, RESERVE_BYTES)
        self._path, self._folder, self._now = path, path.parent, now
        self._waiting: deque[bytes] = deque()
        self._limit = min(limit, PRINTED)
        self._printed, self._since = self._file.size, now()  # another process may have written it
        self._allowed = max(0.0, self._limit / 2 - self._printed)
        self._left_out: dict[tuple[str, str], int] = {}  # printed lines, by rank and stream
        self._full = False

    def append(self, event: events.AnyEvent) -> None:
        """Write an event after those that wait; printed lines and progress are written only if there is space now."""
        if isinstance(event, events.Log):
            self._append_printed(event)
            return
        if isinstance(event, events.Progress) and (len(self._waiting) >= WAITING or self._is_short(RESERVE_BYTES // 4)):
            return
        if isinstance(event, events.Finished):
            for (rank, stream), count in self._left_out.items():
                self._waiting.append(_gap(event.time, rank, stream, count))
        self._waiting.append(events.to_line(event))
        self.flush()

    def last_events(self) -> WrittenEvents:
        """Return the last events of the file."""
        with self._path.open("rb") as file:
            file.seek(max(0, self._file.size - LAST))
            return WrittenEvents(file.read().splitlines(keepends=True))

    def flush(self) -> bool:
        """Write waiting events as far as the disk has space; return whether all are written."""
        while self._waiting:
            if not self._file.append(self._waiting[0], RESERVE_BYTES) and not self._file.append(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def close(self) -> None:
        """Write waiting events, release the reserve and close the file."""
        self.flush()
        self._file.close()

    def _is_short(self, spare: int) -> bool:
        """Whether the disk has less free space than `spare` bytes for this file."""
        return not self._file.reserve(RESERVE_BYTES) and not self._file.reserve(spare)

    def _append_printed(self, event: events.Log) -> None:
        data = events.to_line(event)
        source = (event.rank, event.stream)
        if source in self._left_out:
            data = _gap(event.time, *source, self._left_out[source]) + data
        allowed = self._may_print(len(data))
        if allowed and self.flush() and self._file.append(data, RESERVE_BYTES):
            self._left_out.pop(source, None)
            self._printed += len(data)
            self._allowed -= len(data)
            self._full = False
            return
        self._left_out[source] = self._left_out.get(source, 0) + 1
        if allowed and not self._full:
            self._full = True
            self._report_full(event.time)

    def _may_print(self, size: int) -> bool:
        """Whether the limit of printed lines allows `size` more bytes now."""
        left, now = self._limit - self._printed, self._now()
        self._allowed = min(left, self._allowed + (now - self._since) * left / SPREAD)
        self._since = now
        return size <= self._allowed

    def _report_full(self, when: float) -> None:
        text = (
            f"the head's disk is full ({self._folder}): lines that processes print are not shown until there is space; "
            "training continues"
        )
        self.append(events.Notice(time=when, text=text))


def _gap(when: float, rank: str, stream: str, count: int) -> bytes:
    text = f"... {count} lines left out here; see `psctl logs`"
    return events.to_line(events.Log(time=when, rank=rank, stream=stream, text=text))
