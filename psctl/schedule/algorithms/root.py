"""Root: all send the whole vector to one node, which adds it up and sends the sum back.

The node's port carries everything: 2(p-1)(α + Nβ) with p ranks when the node is one of them. Whole vector, one step
each way, as in the textbooks; the ranks' vectors are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.reverse import all_reduce
from psctl.schedule.spread import Spread
from psctl.schedule.transfer import Schedule, Transfer


def spread(world: int, root: int = 0, nodes: int | None = None, shares: Sequence[int] = (1,)) -> Spread:
    """Return the broadcast in which the root sends to each other rank itself.

    Args:
        world: number of ranks.
        root: a rank, or a helper's number.
        nodes: ranks and helpers.
        shares: relative size of each chunk.
    """
    chunks = range(len(shares))
    transfers = [Transfer(0, root, rank, chunk, "copy") for rank in range(world) if rank != root for chunk in chunks]
    return Spread((root,) * len(shares), transfers, tuple(shares), nodes or world)


def build(world: int, root: int = 0) -> Schedule:
    """Return the all-reduce through one rank.

    Raises:
        ValueError: there is no such rank; the caller's fault.
    """
    if not 0 <= root < world:
        raise ValueError(f"a world of {world} has no rank {root}")
    return all_reduce("root", world, spread(world, root), params={"root": root})
