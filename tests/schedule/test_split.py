"""An all-reduce is divided into a reduce-scatter and an all-gather that together move what it moves."""

from __future__ import annotations

import pytest

from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.algorithms.split import split
from psctl.types import DIVISIBLE, STRATEGIES
from tests.helpers.reference_player import play, vectors

WORLDS = (2, 3, 4, 5, 8)


def options(strategy: str, world: int) -> ScheduleOptions:
    if strategy == "multi-ring":
        return ScheduleOptions(rings=((tuple(range(world)), 2), (tuple(range(world))[::-1], 1)))
    if strategy == "packed-trees":
        return ScheduleOptions(trees=((0, tuple((0, rank) for rank in range(1, world)), 1),))
    if strategy == "hierarchical":
        half = world // 2
        return ScheduleOptions(groups=(tuple(range(half)), tuple(range(half, world))), inner="sharded", pieces=2)
    if strategy == "sharded":
        return ScheduleOptions(weights=tuple(range(world)), pieces=3)
    return ScheduleOptions(pieces=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", [name for name in DIVISIBLE if name != "native"])
def test_the_halves_of_a_divisible_strategy_are_proven_and_move_its_bytes(strategy: str, world: int) -> None:
    whole = catalog.build(strategy, world, options(strategy, world))
    found = split(whole)
    assert found.reduce_scatter.collective == "reduce-scatter"
    assert found.all_gather.collective == "all-gather"
    assert len(found.owners) == len(whole.shares)
    halves = [one.sent(1000.0) for one in (found.reduce_scatter, found.all_gather)]
    assert [sum(both) for both in zip(*halves, strict=True)] == pytest.approx(list(whole.sent(1000.0)))
    start = vectors(world, len(whole.shares))
    sums = play(start, found.reduce_scatter.transfers, lambda one, other: one + other)
    assert sums is not None
    for chunk, owner in enumerate(found.owners):
        assert sums[owner, chunk] == sum(start[rank, chunk] for rank in range(world))
    held = {(owner, chunk): chunk + 1 for chunk, owner in enumerate(found.owners)}
    values = play(held, found.all_gather.transfers, lambda one, other: one + other)
    assert values is not None
    assert all(values[rank, chunk] == chunk + 1 for rank in range(world) for chunk in range(len(whole.shares)))


@pytest.mark.parametrize("strategy", ["cpu", "one-shot", "recursive-doubling"])
def test_a_sum_that_no_rank_owns_is_not_divided(strategy: str) -> None:
    with pytest.raises(ValueError, match="is not held by one rank"):
        split(catalog.build(strategy, 4))


def test_divisible_strategies_are_strategies() -> None:
    assert set(DIVISIBLE) < set(STRATEGIES)
