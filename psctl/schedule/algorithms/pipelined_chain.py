"""Pipelined chain: the chain with the vector cut into chunks, so that all its links are busy at once.

(p-2+k)(α + Nβ/k) each way with k chunks, k* = sqrt((p-2)Nβ/α) at best; a chunk goes back as soon as it is summed, so
with links that carry both directions at once the way back costs only the p-1 steps after the last chunk came in.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.algorithms.chain import edges
from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import pipelined


def build(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce along a chain, chunk behind chunk.

    Args:
        world: number of ranks.
        chunks: number of chunks.
        order: the ranks along the chain; the first one sums up.
    """
    params = {"order": list(order or range(world))}
    return pipelined("pipelined-chain", world, [(*edges(world, order), 1)], chunks, params)
