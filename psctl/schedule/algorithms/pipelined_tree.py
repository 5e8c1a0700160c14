"""Pipelined binary tree: chunks follow each other up a balanced tree and down again.

An inner rank gets two vectors and sends one on the way up, and the other way round on the way down, so on one port it
carries 3N each way; depth lg p makes it better than a chain where start-ups count.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import Edges, pipelined


def edges(world: int, order: Sequence[int] | None = None) -> tuple[int, Edges]:
    """Return the tree in which the rank at place i has those at 2i+1 and 2i+2 below it."""
    ranks = tuple(order or range(world))
    return ranks[0], tuple((ranks[(child - 1) // 2], ranks[child]) for child in range(1, world))


def build(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce over one binary tree.

    Args:
        world: number of ranks.
        chunks: number of chunks.
        order: the ranks by their place in the tree, level by level.
    """
    params = {"order": list(order or range(world))}
    return pipelined("pipelined-tree", world, [(*edges(world, order), 1)], chunks, params)
