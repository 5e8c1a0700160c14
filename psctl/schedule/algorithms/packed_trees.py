"""Packed spanning trees: as many trees as the links can carry, each with bytes in proportion to its weight.

Where no ring visits all GPUs of a job over fast links, trees still may (Blink, MLSys 2020). Each tree reduces to its
root and spreads from it over the same links in the other direction. Which trees, is topology/'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import Tree, pipelined


def build(world: int, trees: Sequence[Tree], chunks: int) -> Schedule:
    """Return the all-reduce over packed trees.

    Args:
        world: number of ranks.
        trees: (root, edges (parent, child), weight) of each; each spans all ranks.
        chunks: chunks of each tree's part.
    """
    roots, weights = [root for root, _, _ in trees], [weight for _, _, weight in trees]
    return pipelined("packed-trees", world, trees, chunks, {"roots": roots, "weights": weights})
