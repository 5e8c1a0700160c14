"""Chain: the vector goes from rank to rank, added to on the way in and copied on the way back.

Only one link is busy at any time: 2(p-1)(α + Nβ). The seeds' example of how not to do it; see `pipelined_chain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import Edges, pipelined


def edges(world: int, order: Sequence[int] | None = None) -> tuple[int, Edges]:
    """Return the chain as a tree: its root, the first rank, and an edge from each rank to the next."""
    ranks = tuple(order or range(world))
    return ranks[0], tuple(pairwise(ranks))


def build(world: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce along a chain in one piece.

    Args:
        world: number of ranks.
        order: the ranks along the chain; the first one ends up with the sum.
    """
    params = {"order": list(order or range(world))}
    return pipelined("chain", world, [(*edges(world, order), 1)], 1, params)
