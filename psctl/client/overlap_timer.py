"""How long something is under way, whether or not anybody waits for it: what is not waited for is hidden."""

from __future__ import annotations

from psctl.clock import Clock


class UnderWay:
    """Adds up the time from the first beginning to the next end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._before = 0.0

    def begin(self) -> None:
        """Something leaves."""
        if self._since is None:
            self._since = self._clock.now()

    def end(self) -> None:
        """All that left is answered."""
        if self._since is not None:
            self._before += self._clock.now() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far, of what has ended."""
        return self._before
