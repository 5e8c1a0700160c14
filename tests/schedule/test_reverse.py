"""The reverse of an all-gather is a reduction; reversing twice restores it."""

from __future__ import annotations

import msgspec
import pytest

from psctl.schedule.algorithms import bruck, doubling, parameter_server, ring, root, sharded, trees
from psctl.schedule.algorithms.collectives import pipelined_broadcast
from psctl.schedule.checker import ScheduleError
from psctl.schedule.phases import AllGather, all_reduce, reverse, shifted
from psctl.schedule.schedule import Transfer
from tests.helpers.proofs import prove
from tests.helpers.reference_player import play, sums_everywhere, vectors


def all_gathers(world: int) -> dict[str, AllGather]:
    found = {
        "ring": ring.all_gather(world),
        "ring of pieces": ring.all_gather(world, 3),
        "ring the other way": ring.all_gather(world, direction=-1),
        "sharded": sharded.all_gather(world),
        "sharded, unequal": sharded.all_gather(world, range(world, 0, -1)),
        "sharded, paced": sharded.all_gather(world, paced=True),
        "bruck": bruck.all_gather(world),
        "binomial": trees.binomial_broadcast(world),
        "root": root.broadcast(world, world - 1),
        "servers": parameter_server.pull(world, (world - 1, world, world + 1), (1, 2, 3)),
        "chain": AllGather((0,) * 4, pipelined_broadcast(*trees.chain_edges(world), 4), (1,) * 4, world),
        "binary tree": AllGather((0,) * 4, pipelined_broadcast(*trees.binary_edges(world), 4), (1,) * 4, world),
        "one of a double tree": AllGather((0,), trees.broadcast(*trees.odd_leaves_edges(world)), (1,), world),
        "opposite order": trees.binomial_broadcast(world).reordered(tuple(range(world))[::-1]),
    }
    if world & (world - 1) == 0:
        found["doubling"] = doubling.all_gather(world)
    return found


@pytest.mark.parametrize("world", range(1, 10))
def test_an_all_gather_in_reverse_adds_each_contribution_once(world: int) -> None:
    for name, gather in all_gathers(world).items():
        start = vectors(world, len(gather.shares))
        ends = play(start, reverse(gather.transfers), lambda one, other: one + other)
        assert ends is not None, name
        for chunk, owner in enumerate(gather.owners):
            assert ends[owner, chunk] == sum(start[rank, chunk] for rank in range(world)), name
        given = {(owner, chunk): start.get((owner, chunk), 7) for chunk, owner in enumerate(gather.owners)}
        gathered = play(given, gather.transfers, lambda one, other: one + other)
        assert gathered is not None
        assert all(
            gathered[rank, chunk] == given[owner, chunk]
            for chunk, owner in enumerate(gather.owners)
            for rank in range(world)
        ), name
        assert sums_everywhere(world, len(gather.shares), all_reduce(name, world, gather).transfers), name


@pytest.mark.parametrize("world", range(1, 10))
def test_reversing_twice_restores_the_transfers(world: int) -> None:
    for name, gather in all_gathers(world).items():
        again = [msgspec.structs.replace(one, action="copy") for one in reverse(reverse(gather.transfers))]
        assert sorted(again) == sorted(gather.transfers), name


def test_a_chunk_received_twice_cannot_be_reversed() -> None:
    twice = [Transfer(0, 0, 1, 0, "copy"), Transfer(0, 0, 2, 0, "copy"), Transfer(1, 1, 2, 0, "copy")]
    prove("wasteful", "broadcast", 3, twice)
    with pytest.raises(ScheduleError, match="twice"):
        prove("wasteful, reversed", "reduce", 3, reverse(twice))


def test_shifting_and_reordering_change_only_their_fields() -> None:
    one = Transfer(1, 2, 3, 4, "reduce", 5)
    assert shifted([one], step=10, chunk=20, lane=30) == [Transfer(11, 2, 3, 24, "reduce", 35)]
    with pytest.raises(ValueError, match="order"):
        trees.binomial_broadcast(3).reordered((0, 1))
    with pytest.raises(ValueError, match="order"):
        trees.binomial_broadcast(3).reordered((0, 1, 1))
