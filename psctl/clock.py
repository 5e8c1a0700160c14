"""The clock that functions take as an argument, so that tests can pass one of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return seconds that only go forward, from an arbitrary start."""

    def wall(self) -> float:
        """Return seconds since the epoch, for people and for files."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own time."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)
