"""Computes which examples a clock consumes, and the share of each rank.

The examples of an epoch have one order (a permutation made from seed and epoch); a clock takes the next `batch`
positions of it. The positions of clock c depend only on the number of examples, the batch and, for the tail, the
number of workers:

- every clock takes `batch` positions, the last one the remaining positions;
- a tail smaller than the number of workers is added to the clock before, since otherwise a rank would have no example;
- the ranks share a clock's positions in rank order, as evenly as whole examples allow: the first ranks have one more.

So every position is taken exactly once an epoch, for any members.
"""

from __future__ import annotations

from psctl.types import Range


def clocks_in_epoch(examples: int, batch: int, world: int) -> int:
    """Return how many clocks an epoch has.

    Args:
        examples: number of examples in the data set.
        batch: examples that one clock consumes over all ranks.
        world: number of ranks.
    """
    assert examples >= 0, "a data set has no negative length"
    assert batch >= 1, "a clock consumes at least one example"
    assert world >= 1, "at least one worker trains"
    full, tail = divmod(examples, batch)
    if tail == 0 or (full > 0 and tail < world):
        return full
    return full + 1


def positions(examples: int, batch: int, world: int, clock: int) -> Range:
    """Return the positions of the epoch's order that `clock` (counted from 0 within the epoch) consumes."""
    clocks = clocks_in_epoch(examples, batch, world)
    assert 0 <= clock < clocks, f"clock {clock} of an epoch of {clocks}"
    start = clock * batch
    return Range(start, examples if clock == clocks - 1 else start + batch)


def share(of: Range, world: int, rank: int) -> Range:
    """Return the part of a clock's positions that `rank` takes."""
    assert 0 <= rank < world, f"rank {rank} of {world}"
    each, more = divmod(len(of), world)
    start = of.start + rank * each + min(rank, more)
    return Range(start, start + each + (rank < more))


def step_mark(step: int, *, inside: bool) -> int:
    """Return a number that never decreases, and increases at the beginning and at the end of each step.

    Args:
        step: steps that have ended.
        inside: whether the next step has begun.
    """
    return 2 * step + inside
