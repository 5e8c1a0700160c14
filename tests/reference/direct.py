"""Direct: every chunk is sent from its source to its destinations without steps between.

It carries out whatever the scatter-gather primitive describes, so it is one implementation of five collectives: all at
once, each pair on its lane, or paced, one peer at a time.
"""

from __future__ import annotations

from psctl.schedule.phases import Transfers, without_gaps
from psctl.schedule.schedule import Transfer
from tests.reference.collective_schedule import CollectiveSchedule, prove
from tests.reference.scatter_gather import ScatterGather


def transfers(primitive: ScatterGather, world: int, paced: bool = False) -> Transfers:
    """Return the copies of a movement, unit by unit.

    Args:
        primitive: the movement.
        world: number of ranks; a pair's distance in it, counted upwards, is its lane or its step.
        paced: in step k - 1 every source sends to the rank k further on; else all at once.
    """
    found = []
    for chunk, (source, ranks) in enumerate(primitive.routes(primitive.units)):
        for rank in ranks:
            away = (rank - source) % world
            if away:
                step, lane = (away - 1, 0) if paced else (0, away - 1)
                found.append(Transfer(step, source, rank, chunk, "copy", lane))
    return without_gaps(found)


def build(primitive: ScatterGather, world: int, paced: bool = False) -> CollectiveSchedule:
    """Return the collective that a movement is, done directly.

    Args:
        primitive: the movement; one source, one destination, or the same ranks on both sides.
        world: number of ranks.
        paced: one peer at a time.

    Raises:
        ValueError: sources and destinations are two different groups, or no ranks of the world; the caller's fault.
    """
    sources, destinations, collective = primitive.sources, primitive.destinations, primitive.collective
    members = tuple(sorted({*sources, *destinations}))
    if len(sources) > 1 and len(destinations) > 1 and sources != destinations:
        raise ValueError("many to many goes among the same ranks; two groups exchange in two movements")
    if collective in ("gather", "scatter"):
        owners = sources if collective == "gather" else destinations
        root = destinations[0] if collective == "gather" else sources[0]
    else:
        owners, root = (), sources[0]
        members = sources if len(sources) > 1 else members  # many to many: in their order, for the chunks are in it
    shares = (1,) * primitive.units
    found = transfers(primitive, world, paced)
    return prove("direct", collective, world, found, shares, root=root, owners=owners, members=members)
