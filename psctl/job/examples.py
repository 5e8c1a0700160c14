"""Computes which examples a clock consumes, and the share of each rank.

The examples of an epoch have one order (a permutation made from seed and epoch); a clock takes the next `batch`
positions of it. The positions of clock c depend only on the number of examples, the batch and, for the tail, the
number of workers:

- every clock takes `batch` positions, the last one the remaining positions;
- a tail smaller than the number of workers is added to the clock before, since otherwise a rank would have no example;
- the ranks share a clock's positions in rank order, as evenly as whole examples allow: the first ranks have one more;
  or, where `loader: {share: speed}` asks for it, by parts that the coordinator made of measured speeds: each rank
  has one position, and the rest is divided in proportion to the parts.

So every position is taken exactly once an epoch, for any members and parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.types import Range

WHOLE = 10_000
"""The sum of all parts, but for rounding."""


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


def share(of: Range, world: int, rank: int, parts: Sequence[int] = ()) -> Range:
    """Return the part of a clock's positions that `rank` takes.

    Args:
        of: the clock's positions.
        world: number of ranks.
        rank: a number below it.
        parts: of each rank; empty: all have as many.
    """
    assert 0 <= rank < world, f"rank {rank} of {world}"
    if len(parts) == world and len(of) >= world:
        rest, whole = len(of) - world, sum(parts)
        first, stop = (rest * sum(parts[:end]) // whole + end for end in (rank, rank + 1))
        return Range(of.start + first, of.start + stop)
    each, more = divmod(len(of), world)
    start = of.start + rank * each + min(rank, more)
    return Range(start, start + each + (rank < more))


def parts_by_speed(examples: Mapping[int, float], seconds: Mapping[int, float]) -> tuple[list[int], float]:
    """Return the parts that give all ranks equal times, in rank order, and what they save.

    A rank's time is taken to be proportional to its examples. Where a part of it is not, the parts made of the next
    measurement are nearer.

    Args:
        examples: by rank, in a step.
        seconds: by rank: spent on them, without waits for other ranks.

    Returns:
        the parts, integers of 1 or more with a sum of some WHOLE, and the part of the slowest rank's time that is
        saved.
    """
    speeds = {rank: max(examples[rank], 1.0) / max(seconds[rank], 1e-9) for rank in examples}
    every = sum(speeds.values())
    now, then = max(seconds.values()), sum(examples.values()) / every
    parts = [max(1, round(WHOLE * speed / every)) for _, speed in sorted(speeds.items())]
    return parts, 1 - then / now if now > 0 else 0.0


def step_mark(step: int, *, inside: bool) -> int:
    """Return a number that never decreases, and increases at the beginning and at the end of each step.

    Args:
        step: steps that have ended.
        inside: whether the next step has begun.
    """
    return 2 * step + inside
