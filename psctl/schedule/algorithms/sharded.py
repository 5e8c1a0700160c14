"""Sharded: each rank sums a part of the vector for all, and sends it to all.

Direct reduce-scatter and all-gather, 2(p-1)/p N bytes a rank like the ring, in 2 rounds instead of 2(p-1), for which
every rank must reach every other at once. Shares need not be equal: a rank whose link is a fifth of the others' owns
nothing, sends its vector once and gets the sum once, while the others carry the rest. What it sends and what it gets
overlap only when the vector is cut into pieces, of which one comes back while the next goes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.reverse import all_reduce
from psctl.schedule.spread import Spread
from psctl.schedule.transfer import Schedule, Transfer


def spread(world: int, weights: Sequence[int] | None = None, paced: bool = False) -> Spread:
    """Return the direct all-gather: every owner sends its chunk to all.

    Args:
        world: number of ranks.
        weights: relative share of each rank, whole numbers; 0 owns nothing; equal when None.
        paced: one peer at a time, in p-1 steps in which every rank sends one chunk and gets one; else all peers at
            once, each on a lane of its own.

    Raises:
        ValueError: the weights do not fit the world, or are all 0; the caller's fault.
    """
    parts = tuple(weights or (1,) * world)
    if len(parts) != world or any(part < 0 for part in parts) or not any(parts):
        raise ValueError(f"{world} ranks need {world} shares, not all 0; not {list(parts)}")
    owners = tuple(rank for rank, part in enumerate(parts) if part)
    transfers = [
        Transfer(
            *((away - 1, owner) if paced else (0, owner)),
            (owner + away) % world,
            chunk,
            "copy",
            0 if paced else away - 1,
        )
        for away in range(1, world)
        for chunk, owner in enumerate(owners)
    ]
    return Spread(owners, transfers, tuple(part for part in parts if part), world)


def build(world: int, weights: Sequence[int] | None = None, pieces: int = 1, paced: bool = False) -> Schedule:
    """Return the all-reduce in which each rank sums its share.

    Args:
        world: number of ranks.
        weights: relative share of each rank; equal when None.
        pieces: cut every share so often; 2 or more let what goes out overlap with what comes back.
        paced: one peer at a time.
    """
    params = {"weights": list(weights or (1,) * world), "pieces": pieces, "paced": paced}
    return all_reduce("sharded", world, spread(world, weights, paced), pieces=pieces, params=params)
