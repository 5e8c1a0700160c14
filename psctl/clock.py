"""Time as an argument: a clock to pass in, and one that tests move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What can be asked of time."""

    def now(self) -> float:
        """Return seconds that only go forward, from an arbitrary start."""

    def wall(self) -> float:
        """Return seconds since the epoch, for people and for files."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that stands still until it is moved; `sleep` moves it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (not negative)."""
        assert seconds >= 0, "time does not go backwards"
        self._now += seconds
