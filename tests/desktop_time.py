"""Time limits that hold on any machine: seconds are scaled by the time of a fixed piece of work on this processor."""

from __future__ import annotations

import time

WORK_SECONDS = 0.05
"""Processor seconds of the fixed work on a desktop."""


def desktop_seconds(taken: float) -> float:
    """Return the seconds on a desktop of work that takes `taken` processor seconds here."""
    begin = time.process_time()
    total = 0
    for number in range(700_000):
        total += number * number % 7
    return taken * WORK_SECONDS / (time.process_time() - begin)
