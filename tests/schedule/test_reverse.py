"""The law: a spread run backwards is a reduction, and run backwards twice it is itself."""

from __future__ import annotations

import msgspec
import pytest

from psctl.schedule import tree_spreads
from psctl.schedule.algorithms import (
    binomial,
    bruck,
    chain,
    double_tree,
    halving_doubling,
    pipelined_tree,
    ring,
    root,
    sharded,
    star,
)
from psctl.schedule.checker import ScheduleError, prove
from psctl.schedule.reverse import backwards, turned
from psctl.schedule.spread import Spread, moved, place
from psctl.schedule.transfer import Transfer
from tests.schedule.brute import play, sums_everywhere, vectors


def spreads(world: int) -> dict[str, Spread]:
    found = {
        "ring": ring.spread(world),
        "ring of pieces": ring.spread(world, 3),
        "ring the other way": ring.spread(world, turn=-1),
        "sharded": sharded.spread(world),
        "sharded, unequal": sharded.spread(world, range(world, 0, -1)),
        "sharded, paced": sharded.spread(world, paced=True),
        "bruck": bruck.spread(world),
        "binomial": binomial.spread(world),
        "root": root.spread(world, world - 1),
        "servers": star.spread(world, (world - 1, world, world + 1), (1, 2, 3)),
        "chain": Spread((0,) * 4, tree_spreads.broadcast(*chain.edges(world), 4), (1,) * 4, world),
        "binary tree": Spread((0,) * 4, tree_spreads.broadcast(*pipelined_tree.edges(world), 4), (1,) * 4, world),
        "one of a double tree": Spread((0,), tree_spreads.down(*double_tree.edges(world)), (1,), world),
        "backwards order": place(binomial.spread(world), tuple(range(world))[::-1]),
    }
    if world & (world - 1) == 0:
        found["doubling"] = halving_doubling.spread(world)
    return found


@pytest.mark.parametrize("world", range(1, 10))
def test_a_spread_backwards_adds_each_contribution_once(world: int) -> None:
    for name, spread in spreads(world).items():
        start = vectors(world, len(spread.shares))
        ends = play(start, backwards(spread.transfers), lambda one, other: one + other)
        assert ends is not None, name
        for chunk, owner in enumerate(spread.owners):
            assert ends[owner, chunk] == sum(start[rank, chunk] for rank in range(world)), name
        given = {(owner, chunk): start.get((owner, chunk), 7) for chunk, owner in enumerate(spread.owners)}
        spread_out = play(given, spread.transfers, lambda one, other: one + other)
        assert spread_out is not None
        assert all(
            spread_out[rank, chunk] == given[owner, chunk]
            for chunk, owner in enumerate(spread.owners)
            for rank in range(world)
        ), name
        assert sums_everywhere(world, len(spread.shares), turned(spread)), name


@pytest.mark.parametrize("world", range(1, 10))
def test_backwards_twice_is_the_same(world: int) -> None:
    for name, spread in spreads(world).items():
        again = [msgspec.structs.replace(one, action="copy") for one in backwards(backwards(spread.transfers))]
        assert sorted(again) == sorted(spread.transfers), name


def test_a_rank_that_gets_a_chunk_twice_makes_no_reduction() -> None:
    twice = [Transfer(0, 0, 1, 0, "copy"), Transfer(0, 0, 2, 0, "copy"), Transfer(1, 1, 2, 0, "copy")]
    prove("wasteful", "broadcast", 3, twice)
    with pytest.raises(ScheduleError, match="twice"):
        prove("wasteful, backwards", "reduce", 3, backwards(twice))


def test_moved_and_placed_keep_the_rest() -> None:
    one = Transfer(1, 2, 3, 4, "reduce", 5)
    assert moved([one], step=10, chunk=20, lane=30) == [Transfer(11, 2, 3, 24, "reduce", 35)]
    with pytest.raises(ValueError, match="order"):
        place(binomial.spread(3), (0, 1))
    with pytest.raises(ValueError, match="order"):
        place(binomial.spread(3), (0, 1, 1))
