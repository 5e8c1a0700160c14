"""The sizes above which a ring all-reduce is faster than its rivals, by the closed forms."""

from __future__ import annotations

import math

from psctl.plan.allreduce_times import UniformRates


def ring_beats_halving_doubling(world: int, rates: UniformRates) -> float:
    """Return the bytes above which a ring is faster; infinite for a power of two, where it never is.

    (alpha / beta)(p - 2 - floor(lg p)) when what is folded is counted as (p-1)/p, as MPICH's authors do; exactly, the
    folding costs 2 - 2/q + 2/p instead of 2.
    """
    core = 1 << (world.bit_length() - 1)
    if core == world:
        return math.inf
    steps = 2 * (world - 1) - 2 * core.bit_length()
    return rates.alpha * steps / (rates.beta * (2 + 2 / world - 2 / core))


def ring_beats_double_tree(world: int, rates: UniformRates) -> float:
    """Return the bytes above which a ring is faster than two pipelined trees of 2 lg p alpha + 2 N beta:
    (alpha / beta) p (p - 1 - lg p)."""
    return rates.alpha / rates.beta * world * (world - 1 - math.log2(world))
