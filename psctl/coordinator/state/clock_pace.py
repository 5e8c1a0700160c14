"""How long clocks usually take, and when one takes too long.

A clock is done when the slowest worker has done it. How long clocks usually take is the median of the last ones; one
that takes PATIENCE times as long, and at least LEAST seconds, is late.
"""

from __future__ import annotations

from collections import deque
from statistics import median

PATIENCE = 5.0
"""How many times as long as usual a clock takes before somebody is named."""

LEAST = 2.0
"""Seconds below which nothing is late: reports come in once a second or so."""

KEPT = 50
"""Clocks whose times are kept."""

ENOUGH = 3
"""Looks at the clocks before anything can be said to be unusual."""


class ClockPace:
    """How long clocks take.

    Args:
        now, step: when training began, and after which step.
    """

    def __init__(self, now: float, step: int) -> None:
        self.since, self.step = now, step
        self.late: set[int] = set()  # ranks that were named for this step
        self._took: deque[float] = deque(maxlen=KEPT)

    def reached(self, now: float, step: int) -> bool:
        """The slowest worker is at this step; return whether that is new."""
        if step == self.step:
            return False
        if step > self.step:
            self._took.append((now - self.since) / (step - self.step))
        self.since, self.step, self.late = now, step, set()
        return True

    @property
    def usual(self) -> float | None:
        """Seconds that a clock usually takes; None when too few were seen."""
        return median(self._took) if len(self._took) >= ENOUGH else None

    def is_late(self, now: float, interval: float) -> bool:
        """Does the clock under way take much longer than usual?

        Args:
            interval: seconds between two reports of a worker, which is how old a word of a new step may be.
        """
        usual = self.usual
        return usual is not None and now - self.since >= max(LEAST, PATIENCE * usual) + interval
