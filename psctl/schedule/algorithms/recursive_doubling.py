"""Recursive doubling: pairs at distance 1, 2, 4 ... exchange their whole sums.

lg p (α + Nβ + Nγ): the fewest start-ups, at the price of the whole vector in each; for small messages. Both of a pair
add the same two values, so all end with the same bits. Other numbers of ranks than powers of two fold first and unfold
last, as in `halving_doubling`.
"""

from __future__ import annotations

from psctl.schedule.algorithms.halving_doubling import around
from psctl.schedule.checker import prove
from psctl.schedule.transfer import Schedule, Transfer


def build(world: int) -> Schedule:
    """Return the recursive-doubling all-reduce of any number of ranks."""
    bits = world.bit_length() - 1
    core = [Transfer(step, rank, rank ^ 1 << step, 0, "reduce") for step in range(bits) for rank in range(1 << bits)]
    return prove("recursive-doubling", "all-reduce", world, around(world, core, 1))
