"""Double binary tree: two trees with half of the bytes each, in which nobody has children in both.

In one binary tree half of the ranks are leaves and their ports idle; the second tree makes them its inner ranks
(Sanders, Speck and Träff 2009; NCCL 2.4). So every rank carries 2N in and 2N out for about 2 lg p start-ups:
2 lg p α + 2Nβ + O(sqrt(αβN lg p)). With an odd number of ranks one rank, 0, has a child in both.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import Edges, Tree, pipelined


def edges(world: int) -> tuple[int, Edges]:
    """Return the first tree: odd ranks are its leaves, and rank 0, its root, has one child.

    A rank's parent comes from its lowest set bit b: without b and with 2b set; where there is no such rank, without b.
    """
    found = []
    for rank in range(1, world):
        bit = rank & -rank
        parent = (rank ^ bit) | 2 * bit
        found.append((parent if parent < world else rank ^ bit, rank))
    return 0, tuple(found)


def trees(world: int, order: Sequence[int] | None = None) -> tuple[Tree, Tree]:
    """Return both trees, of equal weight: the second is the first with every rank called by the next one's number."""
    ranks = tuple(order or range(world))
    second = [ranks[(rank + 1) % world] for rank in range(world)]
    root, first = edges(world)

    def named(names: Sequence[int]) -> Tree:
        return names[root], tuple((names[parent], names[child]) for parent, child in first), 1

    return named(ranks), named(second)


def build(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce over two binary trees, half of the vector over each.

    Args:
        world: number of ranks.
        chunks: chunks of each half.
        order: the ranks by their place in the first tree.
    """
    params = {"order": list(order or range(world))}
    return pipelined("double-tree", world, trees(world, order), chunks, params)
