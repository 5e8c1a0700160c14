"""Limits of time that hold on any machine: a piece of work is timed beside what is tested, by the processor's clock."""

from __future__ import annotations

import time

UNIT = 0.05
"""Seconds of a desktop's processor that the yardstick takes."""


def desktop_seconds(taken: float) -> float:
    """Return what so many seconds of this processor are on a desktop, by what a fixed piece of work takes here now."""
    begin = time.process_time()
    total = 0
    for number in range(700_000):
        total += number * number % 7
    return taken * UNIT / (time.process_time() - begin)
