"""Binomial tree: in every round each rank that has the vector gives it to one that has not, so senders double.

⌈lg p⌉ rounds each way with the whole vector: 2⌈lg p⌉(α + Nβ). The largest distance comes first, so that the ranks below
each rank are neighbours: then the same tree scatters, giving each rank the part of those below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.reverse import all_reduce
from psctl.schedule.spread import Spread, Transfers, place
from psctl.schedule.transfer import Schedule, Transfer


def rounds(world: int) -> list[list[tuple[int, int, int]]]:
    """Return for each round its edges (sender, receiver, end): the receiver stands for the ranks up to `end`."""
    top = (world - 1).bit_length()
    return [
        [(rank, rank + distance, min(rank + 2 * distance, world)) for rank in range(0, world - distance, 2 * distance)]
        for distance in (1 << bit for bit in reversed(range(top)))
    ]


def spread(world: int) -> Spread:
    """Return the broadcast of one chunk from rank 0."""
    transfers = [
        Transfer(step, parent, child, 0, "copy")
        for step, edges in enumerate(rounds(world))
        for parent, child, _ in edges
    ]
    return Spread((0,), transfers, (1,), world)


def scatter(world: int) -> Transfers:
    """Return the copies that bring chunk i from rank 0 to rank i, halving what travels in every round."""
    return [
        Transfer(step, parent, child, chunk, "copy")
        for step, edges in enumerate(rounds(world))
        for parent, child, end in edges
        for chunk in range(child, end)
    ]


def build(world: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce up and down a binomial tree.

    Args:
        world: number of ranks.
        order: the ranks by their place in the tree, its root first.
    """
    params = {"order": list(order or range(world))}
    return all_reduce("tree", world, place(spread(world), order), params=params)
