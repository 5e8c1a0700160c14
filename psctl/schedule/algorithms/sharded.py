"""Sharded: each rank sums a part of the vector for all, and sends it to all. One-shot: each rank sums all of it itself.

Sharded is a direct reduce-scatter and all-gather (two-shot on GPUs): 2(p-1)/p N bytes a rank like the ring, in 2 rounds
instead of 2(p-1), for which every rank must reach every other at once. Shares need not be equal: a rank whose link is a
fifth of the others' owns nothing, sends its vector once and gets the sum once, while the others carry the rest. What a
rank sends and what it receives overlap only when the vector is cut into pieces, of which one is gathered while the next
is reduced.

In one-shot each rank gets all others' whole vectors and adds them in the order of the ranks: one start-up, (p-1)N bytes
out of each rank, for messages so small that only start-ups count. All add in the same order, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.checker import prove
from psctl.schedule.phases import AllGather, all_reduce
from psctl.schedule.schedule import Schedule, Transfer


def all_gather(world: int, weights: Sequence[int] | None = None, paced: bool = False) -> AllGather:
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
    transfers = []
    for away in range(1, world):
        step, lane = (away - 1, 0) if paced else (0, away - 1)
        transfers += [
            Transfer(step, owner, (owner + away) % world, chunk, "copy", lane) for chunk, owner in enumerate(owners)
        ]
    return AllGather(owners, transfers, tuple(part for part in parts if part), world)


def sharded(world: int, weights: Sequence[int] | None = None, pieces: int = 1, paced: bool = False) -> Schedule:
    """Return the all-reduce in which each rank sums its share.

    Args:
        world: number of ranks.
        weights: relative share of each rank; equal when None.
        pieces: number of parts of each share; with 2 or more, sending and receiving overlap.
        paced: one peer at a time.
    """
    params = {"weights": list(weights or (1,) * world), "pieces": pieces, "paced": paced}
    return all_reduce("sharded", world, all_gather(world, weights, paced), pieces=pieces, params=params)


def one_shot(world: int) -> Schedule:
    """Return the all-reduce of one step; each pair's message has a lane of its own at both ends."""
    transfers = [
        Transfer(0, rank, (rank + away) % world, 0, "reduce", away - 1)
        for rank in range(world)
        for away in range(1, world)
    ]
    return prove("one-shot", world, transfers)
