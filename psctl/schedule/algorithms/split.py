"""An all-reduce divided into its reduce-scatter and its all-gather, between which each rank may change what it holds.

In an all-reduce by phases each chunk is summed towards one rank, its owner, and copied from there. Of such a chunk
every other rank sends its sum on, once, and the owner sends none; so the transfers that reduce are a reduce-scatter,
and those that copy are an all-gather from the owners. Both are proven as what they are. An all-reduce in which all
ranks end the reduction with the whole sum, or a helper that is no rank, cannot be divided.
"""

from __future__ import annotations

from typing import NamedTuple

from psctl.schedule.checker import Contract, Holdings, prove
from psctl.schedule.phases import without_gaps
from psctl.schedule.schedule import Schedule


class SplitAllReduce(NamedTuple):
    """The two halves of an all-reduce. `owners`: the rank that holds each chunk between them."""

    reduce_scatter: Schedule
    all_gather: Schedule
    owners: tuple[int, ...]


def split(schedule: Schedule) -> SplitAllReduce:
    """Return the halves of an all-reduce.

    Raises:
        ValueError: some chunk has no rank that owns its sum, so that the strategy is none of types.DIVISIBLE; the
            caller's fault.
    """
    adds = [one for one in schedule.transfers if one.action == "reduce"]
    copies = [one for one in schedule.transfers if one.action == "copy"]
    ranks, chunks = range(schedule.world), range(len(schedule.shares))
    senders = {(one.source, one.chunk) for one in adds}
    keeping = [[rank for rank in ranks if (rank, chunk) not in senders] for chunk in chunks]
    if schedule.nodes > schedule.world or any(len(kept) != 1 for kept in keeping):
        raise ValueError(f"{schedule.name}: a chunk's sum is not held by one rank before it is copied")
    owners = tuple(kept[0] for kept in keeping)
    return SplitAllReduce(
        prove(
            schedule.name, schedule.world, without_gaps(adds), schedule.shares, params=schedule.params,
            contract=_reduce_scatter(schedule.world, owners),
        ),
        prove(
            schedule.name, schedule.world, without_gaps(copies), schedule.shares, params=schedule.params,
            contract=_all_gather(schedule.world, owners),
        ),
        owners,
    )  # fmt: skip


def _reduce_scatter(world: int, owners: tuple[int, ...]) -> Contract:
    first: Holdings = {(rank, chunk): 1 << rank for rank in range(world) for chunk in range(len(owners))}
    last = {(owner, chunk): (1 << world) - 1 for chunk, owner in enumerate(owners)}
    return Contract("reduce-scatter", tuple(range(world)), first, last)


def _all_gather(world: int, owners: tuple[int, ...]) -> Contract:
    first: Holdings = {(owner, chunk): 1 << owner for chunk, owner in enumerate(owners)}
    last = {(rank, chunk): 1 << owner for chunk, owner in enumerate(owners) for rank in range(world)}
    return Contract("all-gather", tuple(range(world)), first, last, same_bits=True)
