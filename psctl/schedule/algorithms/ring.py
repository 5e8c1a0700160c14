"""Rings: each rank sends to its neighbour alone, one chunk a step, so that all links are busy all the time.

2(p-1) steps of N/p bytes: 2(p-1)/p N bytes out of each rank, the least that any algorithm can do on a network where a
rank has one port (Patarasuk and Yuan 2009), for 2(p-1) start-ups. Rank i begins with chunk i and gets chunk i-1; the
second lap brings the finished chunks round. Both directions halve the time only where a rank has separate links to its
two neighbours. Several rings share the bytes in proportion to their links (Wang and others 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.reverse import all_reduce, backwards
from psctl.schedule.spread import Spread, Transfers, moved, place
from psctl.schedule.transfer import Schedule, Transfer


def spread(world: int, pieces: int = 1, turn: int = 1) -> Spread:
    """Return the all-gather round a ring: p-1 laps, each rank sending on what it got last; rank i owns chunk i + 1.

    Args:
        world: number of ranks, each sending to the next.
        pieces: chunks a rank owns; each travels as a message of its own, so that the wire is busy while one is added.
        turn: 1 sends to the next rank, -1 to the one before, with the pieces in the opposite order.
    """
    transfers = [
        Transfer(
            lap * pieces + (piece if turn == 1 else pieces - 1 - piece), rank, (rank + turn) % world,
            (rank + 1 - turn * lap) % world * pieces + piece, "copy",
        )
        for lap in range(world - 1)
        for piece in range(pieces)
        for rank in range(world)
    ]  # fmt: skip
    owners = tuple((part - 1) % world for part in range(world) for _ in range(pieces))
    return Spread(owners, transfers, (1,) * (world * pieces), world)


def build(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> Schedule:
    """Return the ring all-reduce in one direction.

    Args:
        world: number of ranks.
        order: the ranks round the ring; as numbered when None.
        pieces: messages a chunk is cut into.
    """
    there, up = both_laps(world, order, pieces)
    params = {"order": list(order or range(world)), "pieces": pieces}
    return all_reduce("ring", world, there, up=up, params=params)


def bidirectional(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> Schedule:
    """Return the all-reduce with half of the bytes each way round the ring, on lanes of their own."""
    found = tuple(order or range(world))
    there, up = _together(world, [(found, 1), (found[::-1], 1)], pieces)
    params = {"order": list(found), "pieces": pieces}
    return all_reduce("bidirectional-ring", world, there, up=up, params=params)


def multi_ring(
    world: int, rings: Sequence[tuple[Sequence[int], int]], pieces: int = 1, both_ways: bool = True
) -> Schedule:
    """Return the all-reduce over several rings at once.

    Args:
        world: number of ranks.
        rings: order of the ranks and number of parallel links (or any whole weight) of each ring; the bytes are
            shared in proportion.
        pieces: messages a chunk is cut into.
        both_ways: use each link in both directions.

    Raises:
        ValueError: no ring, a weight below 1 or an order that is none; the caller's fault.
    """
    if not rings or any(weight < 1 for _, weight in rings):
        raise ValueError("several rings need at least one, each with a positive weight")
    ways = [(tuple(order)[::turn], weight) for order, weight in rings for turn in ((1, -1) if both_ways else (1,))]
    there, up = _together(world, ways, pieces)
    params = {"rings": [list(order) for order, _ in rings], "weights": [weight for _, weight in rings]}
    return all_reduce("multi-ring", world, there, up=up, params={**params, "both_ways": both_ways})


def both_laps(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> tuple[Spread, Transfers]:
    """Return the lap of copies and the lap of additions before it, both in the ring's direction.

    The additions are an all-gather backwards. Backwards also turns the ring round, so it is taken from the ring that
    runs the other way.
    """
    there, mirror = spread(world, pieces), spread(world, pieces, turn=-1)
    return place(there, order), backwards(place(mirror, order).transfers)


def _together(world: int, ways: Sequence[tuple[Sequence[int], int]], pieces: int) -> tuple[Spread, Transfers]:
    """Return rings side by side, each on its lane and with chunks of its own."""
    owners: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    copies: Transfers = []
    additions: Transfers = []
    for lane, (order, weight) in enumerate(ways):
        there, up = both_laps(world, order, pieces)
        copies += moved(there.transfers, chunk=len(shares), lane=lane)
        additions += moved(up, chunk=len(shares), lane=lane)
        owners, shares = owners + there.owners, shares + (weight,) * len(there.shares)
    return Spread(owners, copies, shares, world), additions
