"""Measures how long requests are in flight, whether or not a thread waits for them."""

from __future__ import annotations

from psctl.clock import Clock


class UnderWay:
    """Adds up the times from the first start to the next end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._before = 0.0

    def begin(self) -> None:
        """Note that a request is sent."""
        if self._since is None:
            self._since = self._clock.now()

    def end(self) -> None:
        """Note that all requests are answered."""
        if self._since is not None:
            self._before += self._clock.now() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far, of the times that have ended."""
        return self._before
