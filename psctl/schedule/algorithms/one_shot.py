"""One-shot: everyone sends to everyone at once.

Each rank gets all others' whole vectors and adds them itself: one start-up, (p-1)N bytes out of each rank,
so it is for messages so small that only start-ups count. All ranks add in the order of the ranks, in one step, so all
get the same bits. Two-shot is `sharded` with equal shares: two start-ups, 2(p-1)/p N bytes.
"""

from __future__ import annotations

from psctl.schedule.checker import prove
from psctl.schedule.transfer import Schedule, Transfer


def build(world: int) -> Schedule:
    """Return the all-reduce of one step; each pair's message has a lane of its own at both ends."""
    transfers = [
        Transfer(0, rank, (rank + away) % world, 0, "reduce", away - 1)
        for rank in range(world)
        for away in range(1, world)
    ]
    return prove("one-shot", "all-reduce", world, transfers)
