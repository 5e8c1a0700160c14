"""Bounds of stale synchronous training (Ho and others 2013).

For convex functions with gradients of norm L at most within a diameter F, SGD under SSP has a regret of at most
4 F L sqrt(2 (s+1) P T) (theorem 1), so that the mean error after T clocks grows with the root of s + 1.
"""

from __future__ import annotations

import math


def regret_bound(staleness: int, workers: int, clocks: int, gradient: float, diameter: float) -> float:
    """Return the bound on SSP's regret: how much the sum of all losses is above that of the best point.

    Args:
        staleness: s.
        workers: P.
        clocks: T, the number of gradients that were applied.
        gradient: L, the largest norm of one.
        diameter: F, with half the squared distance of any two points at most F squared.
    """
    return 4 * diameter * gradient * math.sqrt(2 * (staleness + 1) * workers * clocks)


def unseen_updates(staleness: int, workers: int) -> int:
    """Return how many updates, at most, a read lacks of the serial order or has beyond it (SSP's lemma 1)."""
    return 2 * staleness * (workers - 1)
