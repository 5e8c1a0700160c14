"""Rings: each rank sends only to its neighbour, one chunk a step, so that all links are busy all the time.

2(p-1) steps of N/p bytes: 2(p-1)/p N bytes out of each rank, the least that any algorithm can do on a network where a
rank has one port (Patarasuk and Yuan 2009), for 2(p-1) start-ups. Rank i begins with chunk i and gets chunk i-1; the
second lap carries the finished chunks round. Using both directions halves the time only where a rank has separate links
to its two neighbours. Several rings share the bytes in proportion to their links (Wang and others 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.phases import AllGather, Transfers, all_reduce, reverse, shifted
from psctl.schedule.schedule import Schedule, Transfer


def all_gather(world: int, pieces: int = 1, direction: int = 1) -> AllGather:
    """Return the all-gather round a ring: in p-1 rounds each rank forwards what it got last; rank i owns chunk i + 1.

    Args:
        world: number of ranks, each sending to the next.
        pieces: chunks a rank owns; each travels as a message of its own, so that the link is busy while one is added.
        direction: 1 sends to the next rank, -1 to the one before, with the pieces in the opposite order.
    """
    transfers = [
        Transfer(
            lap * pieces + (piece if direction == 1 else pieces - 1 - piece), rank, (rank + direction) % world,
            (rank + 1 - direction * lap) % world * pieces + piece, "copy",
        )
        for lap in range(world - 1)
        for piece in range(pieces)
        for rank in range(world)
    ]  # fmt: skip
    owners = tuple((part - 1) % world for part in range(world) for _ in range(pieces))
    return AllGather(owners, transfers, (1,) * (world * pieces), world)


def ring(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> Schedule:
    """Return the ring all-reduce in one direction.

    Args:
        world: number of ranks.
        order: the ranks round the ring; as numbered when None.
        pieces: messages a chunk is cut into.
    """
    gather, reduction = both_phases(world, order, pieces)
    params = {"order": list(order or range(world)), "pieces": pieces}
    return all_reduce("ring", world, gather, reduction=reduction, params=params)


def bidirectional(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> Schedule:
    """Return the all-reduce with half of the bytes each way round the ring, on lanes of their own."""
    found = tuple(order or range(world))
    gather, reduction = _side_by_side(world, [(found, 1), (found[::-1], 1)], pieces)
    params = {"order": list(found), "pieces": pieces}
    return all_reduce("bidirectional-ring", world, gather, reduction=reduction, params=params)


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
    directions = (1, -1) if both_ways else (1,)
    lanes = [(tuple(order)[::direction], weight) for order, weight in rings for direction in directions]
    gather, reduction = _side_by_side(world, lanes, pieces)
    params = {"rings": [list(order) for order, _ in rings], "weights": [weight for _, weight in rings]}
    return all_reduce("multi-ring", world, gather, reduction=reduction, params={**params, "both_ways": both_ways})


def both_phases(world: int, order: Sequence[int] | None = None, pieces: int = 1) -> tuple[AllGather, Transfers]:
    """Return the all-gather and the reduce-scatter before it, both in the ring's direction.

    Reversing an all-gather reverses the direction of the ring too, so the reduce-scatter is the reverse of the ring in
    the opposite direction.
    """
    gather, opposite = all_gather(world, pieces), all_gather(world, pieces, direction=-1)
    return gather.reordered(order), reverse(opposite.reordered(order).transfers)


def _side_by_side(world: int, rings: Sequence[tuple[Sequence[int], int]], pieces: int) -> tuple[AllGather, Transfers]:
    """Return rings at the same time, each on its lane and with chunks of its own."""
    owners: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    copies: Transfers = []
    additions: Transfers = []
    for lane, (order, weight) in enumerate(rings):
        gather, reduction = both_phases(world, order, pieces)
        copies += shifted(gather.transfers, chunk=len(shares), lane=lane)
        additions += shifted(reduction, chunk=len(shares), lane=lane)
        owners, shares = owners + gather.owners, shares + (weight,) * len(gather.shares)
    return AllGather(owners, copies, shares, world), additions
