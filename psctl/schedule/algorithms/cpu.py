"""The root on the processor: all ranks send to a helper, node p, that holds nothing itself, and get the sum from it.

As `root`, but with p vectors in and p out instead of p-1: 2p(α + Nβ) where all go through the processor's one link.
"""

from __future__ import annotations

from psctl.schedule.algorithms.root import spread
from psctl.schedule.reverse import all_reduce
from psctl.schedule.transfer import Schedule


def build(world: int) -> Schedule:
    """Return the all-reduce through one helper, node `world`."""
    return all_reduce("cpu", world, spread(world, root=world, nodes=world + 1), params={"helper": world})
