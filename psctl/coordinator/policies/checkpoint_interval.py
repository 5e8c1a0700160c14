"""The interval of `checkpoint.every: auto`: the one that loses least time, by Young's formula.

A checkpoint stops training for C seconds; a loss after which all start again costs half an interval on average. With a
mean time M between such losses the time lost, C / T + T / (2 M) of a second each second, is least at T = sqrt(2 C M)
(Young, "A first order approximation to the optimum checkpoint interval", 1974). C is measured at every checkpoint. M
is the expectation from what was seen: before the first loss, that a host is lost once in LIFETIME. Losses after which
the job goes on where it was count for nothing here: they cost no interval.
"""

from __future__ import annotations

import math

LIFETIME = 30 * 86400.0
"""Seconds between two losses of one host that are expected before any was seen."""

FIRST = 60.0
"""Seconds until the first checkpoint, by which the cost is measured."""

SHORTEST, LONGEST = 10.0, 3600.0
"""Bounds of the interval, in seconds: copies of checkpoints use the network, and an estimate may be wrong."""


def mean_time_between_losses(hosts: int, elapsed: float, losses: int) -> float:
    """Return the expected seconds between two losses after which all start again.

    Args:
        hosts: number of hosts that may be lost.
        elapsed: seconds that the job has run.
        losses: such losses in that time.
    """
    return (LIFETIME / max(1, hosts) + elapsed) / (1 + losses)


def interval(cost: float, mean_time: float) -> float:
    """Return the seconds between two checkpoints.

    Args:
        cost: seconds for which a checkpoint stops training; 0: not measured yet.
        mean_time: seconds between two losses.
    """
    if cost <= 0:
        return FIRST
    return min(LONGEST, max(SHORTEST, math.sqrt(2 * cost * mean_time)))
