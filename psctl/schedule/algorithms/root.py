"""Root: all send the whole vector to one node, which adds it up and sends the sum back.

The node's port carries everything: 2(p-1)(alpha + N beta) with p ranks when the node is one of them (`root`), and
2p(alpha + N beta) when it is a helper that contributes nothing, the host's processor (`cpu`). Whole vector, one step
each way, as in the textbooks; the ranks' vectors are added in the order of the ranks.
"""

from __future__ import annotations

from psctl.schedule.phases import AllGather, all_reduce
from psctl.schedule.schedule import Schedule, Transfer


def broadcast(world: int, root: int = 0) -> AllGather:
    """Return the broadcast in which the root, a rank or the helper `world`, sends to each other rank directly."""
    transfers = [Transfer(0, root, rank, 0, "copy") for rank in range(world) if rank != root]
    return AllGather((root,), transfers, (1,), max(world, root + 1))


def through_rank(world: int, root: int = 0) -> Schedule:
    """Return the all-reduce through one rank.

    Raises:
        ValueError: there is no such rank; the caller's fault.
    """
    if not 0 <= root < world:
        raise ValueError(f"a world of {world} has no rank {root}")
    return all_reduce("root", world, broadcast(world, root), params={"root": root})


def through_cpu(world: int) -> Schedule:
    """Return the all-reduce through one helper, node `world`."""
    return all_reduce("cpu", world, broadcast(world, world), params={"helper": world})
