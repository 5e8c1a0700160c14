"""Values of one quantity over steps and time, in bounded memory. Pure."""

from __future__ import annotations

import math


class Series:
    """Values over steps and time.

    Args:
        most: values that are kept; beyond it every second one is dropped, so the whole run stays visible.
    """

    def __init__(self, most: int) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self.values: list[float] = []
        self._most = most
        self._stride = 1

    def add(self, step: int, time: float, value: float) -> None:
        """Add a value, unless it is not finite or nearer to the last one than the kept ones are to each other."""
        if not math.isfinite(value) or (self.steps and step < self.steps[-1] + self._stride):
            return
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        if len(self.steps) > self._most:
            for each in (self.steps, self.times, self.values):
                del each[1::2]
            self._stride = max(1, (self.steps[-1] - self.steps[0]) // (len(self.steps) - 1))

    def cut(self, step: int) -> None:
        """Remove what came after a step: training continues from there."""
        kept = sum(each <= step for each in self.steps)
        for each in (self.steps, self.times, self.values):
            del each[kept:]
