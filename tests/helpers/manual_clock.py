"""A clock that tests move by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that only `advance` and `sleep` move."""

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
        assert seconds >= 0, "seconds must not be negative"
        self._now += seconds
