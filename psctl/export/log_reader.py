"""Reads the event log of a job while it grows, up to its last event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from psctl.job import events
from psctl.types import UNDECODABLE

AT_ONCE = 1 << 20
"""Bytes of one read."""

LOOK = 0.25
"""Seconds between two looks at a file that has not grown."""


def read_events(path: Path, wait: Callable[[float], None] = time.sleep) -> Iterator[events.AnyEvent | None]:
    """Yield the events of a log, and None each time that no more are there yet; end after `finished`.

    A line that is no event is left out: an unfinished one of a process that was killed.

    Args:
        path: of the log, which exists.
        wait: waits so many seconds for more.

    Raises:
        OSError: the file cannot be read.
    """
    rest = b""
    with path.open("rb") as file:
        while True:
            data = file.read(AT_ONCE)
            if not data:
                yield None
                wait(LOOK)
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    event = events.from_line(line)
                except UNDECODABLE:
                    continue
                yield event
                if isinstance(event, events.Finished):
                    return
