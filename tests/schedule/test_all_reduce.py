"""Every strategy's schedule is proven, and no damaged one passes; a second checker compares."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import UsageError
from psctl.schedule.algorithms import catalog, parameter_server, ring
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.checker import ScheduleError, prove
from psctl.schedule.schedule import Schedule, Transfer
from psctl.types import STRATEGIES
from tests.helpers.reference_player import changes, play, sums_everywhere, vectors
from tests.hypothesis_profile import examples

NAMES = tuple(name for name in STRATEGIES if name != "native")


def options(world: int, **more: object) -> ScheduleOptions:
    """Return options that suit every strategy in any world."""
    ranks = tuple(range(world))
    half = max(1, world // 2)
    given = {
        "rings": ((ranks, 2), (ranks[::2] + ranks[1::2], 1)),
        "trees": ((0, tuple((0, rank) for rank in ranks[1:]), 2), (ranks[-1], tuple(pairwise(ranks[::-1])), 1)),
        "groups": tuple(group for group in (ranks[:half], ranks[half:]) if group),
        "inner": "sharded",
        "chunks": 3,
        "helpers": 2,
        **more,
    }  # fmt: skip
    return ScheduleOptions(**given)  # type: ignore[arg-type]


def test_every_strategy_but_the_engines_own_is_a_schedule() -> None:
    assert set(catalog.builders()) == set(NAMES)
    with pytest.raises(UsageError, match="native"):
        catalog.build("native", 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", range(1, 10))
def test_every_strategy_is_proven_for_small_worlds(name: str, world: int) -> None:
    for pieces in (1, 2, 3):
        schedule = catalog.build(name, world, options(world, pieces=pieces))
        assert schedule.name == name and schedule.world == world
        assert sums_everywhere(world, len(schedule.shares), schedule.transfers)
        assert world > 1 or name in ("cpu", "ps") or schedule.steps == 0


@settings(max_examples=examples(200))
@given(st.sampled_from(NAMES), st.integers(10, 33), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_strategy_is_proven_for_larger_worlds_in_any_order(
    name: str, world: int, chunks: int, dice: random.Random
) -> None:
    order = list(range(world))
    dice.shuffle(order)
    cuts = sorted(dice.sample(range(1, world), dice.randint(1, 4)))
    groups = tuple(tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, world], strict=True))
    weights = (*(dice.choice((0, 1, 5)) for _ in range(world - 1)), 2)
    given = options(
        world, chunks=chunks, order=tuple(order), rings=((tuple(order), 3),), groups=groups, weights=weights,
        pieces=dice.randint(1, 3), paced=dice.random() < 0.5, root=dice.randrange(world),
    )  # fmt: skip
    schedule = catalog.build(name, world, given)
    assert sums_everywhere(world, len(schedule.shares), schedule.transfers)


def refusal(schedule: Schedule, transfers: tuple[Transfer, ...]) -> ScheduleError | None:
    try:
        prove("changed", schedule.world, transfers, schedule.shares, nodes=schedule.nodes)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_a_changed_transfer_is_refused_or_harmless(name: str, world: int) -> None:
    dice = random.Random(f"{name} {world}")
    refused: dict[str, int] = {}
    for pieces in (1, 2):
        schedule = catalog.build(name, world, options(world, pieces=pieces))
        chunks = len(schedule.shares)
        for index in dice.sample(range(len(schedule.transfers)), min(12, len(schedule.transfers))):
            for change in changes(schedule, index, dice):
                error = refusal(schedule, change.transfers)
                if error:
                    refused[change.what] = refused.get(change.what, 0) + 1
                    assert "step" in str(error) and "chunk" in str(error) and error.rank >= 0 and error.chunk >= 0
                else:
                    assert sums_everywhere(world, chunks, change.transfers), f"{change.what} of {index} passed"
    assert refused["drop"] and refused["duplicate"] and refused["other chunk"] and refused["other action"]
    assert refused["redirect"] and refused["other source"]


@pytest.mark.parametrize("name", NAMES)
def test_dropping_any_transfer_is_refused(name: str) -> None:
    schedule = catalog.build(name, 5, options(5))
    for index in range(len(schedule.transfers)):
        rest = schedule.transfers[:index] + schedule.transfers[index + 1 :]
        with pytest.raises(ScheduleError):
            prove(name, 5, rest, schedule.shares, nodes=schedule.nodes)


def test_all_ranks_get_equal_bits_without_commutativity() -> None:
    """Nodes of a pair add in the order of their numbers, so even an operation that is not commutative agrees."""
    for name in NAMES:
        for world in (2, 3, 6, 8):
            schedule = catalog.build(name, world, options(world))
            end = play(vectors(world, len(schedule.shares)), schedule.transfers, lambda one, other: 3 * one - 7 * other)
            assert end is not None
            for chunk in range(len(schedule.shares)):
                assert len({end[rank, chunk] for rank in range(world)}) == 1, (name, world)


@pytest.mark.parametrize(
    ("world", "seconds"), [(64, 1.0), (128, 4.0)], ids=["8,064 transfers", "32,512 transfers"]
)  # fmt: skip
def test_a_large_ring_is_built_and_proven_fast(world: int, seconds: float) -> None:
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        schedule = ring.ring(world)
        taken.append(time.perf_counter() - start)
    assert len(schedule.transfers) == 2 * (world - 1) * world
    assert min(taken) < seconds


def test_a_pipeline_of_pieces_keeps_the_bytes() -> None:
    for name in ("sharded", "ps", "hierarchical", "ring"):
        whole, cut = (catalog.build(name, 6, options(6, pieces=pieces)).sent(1.0) for pieces in (1, 5))
        assert cut == pytest.approx(whole)


def test_invalid_servers_are_refused() -> None:
    for servers, shares in [((), ()), ((4, 4), (1, 1)), ((4, 5), (1,))]:
        with pytest.raises(ValueError, match="servers"):
            parameter_server.parameter_server(4, servers, shares)


def test_invalid_options_are_refused_with_the_reason() -> None:
    for name, chosen, why in [
        ("root", ScheduleOptions(root=4), "no rank 4"),
        ("ring", ScheduleOptions(order=(0, 1, 1, 2)), "order"),
        ("chain", ScheduleOptions(order=(0, 1, 2)), "order"),
        ("sharded", ScheduleOptions(weights=(0, 0, 0, 0)), "shares"),
        ("multi-ring", ScheduleOptions(), "rings"),
        ("packed-trees", ScheduleOptions(trees=((0, ((0, 1), (2, 3)), 1),)), "no tree"),
        ("packed-trees", ScheduleOptions(trees=((0, ((0, 1), (0, 1)), 1),)), "reached twice"),
        ("packed-trees", ScheduleOptions(trees=((0, ((0, 1), (0, 2)), 1),)), "lacks"),
        ("hierarchical", ScheduleOptions(groups=((0, 1), (2,))), "groups"),
        ("hierarchical", ScheduleOptions(groups=((0, 1, 2), (3,))), "try sharded"),
        ("hierarchical", ScheduleOptions(groups=((0, 1), (2, 3)), inner="wheel"), "wheel"),
        ("hierarchical", ScheduleOptions(groups=((0, 1), (2, 3)), outer="cpu"), "helpers"),
        ("pipelined-chain", ScheduleOptions(chunks=0), "at least one"),
    ]:
        with pytest.raises(ValueError, match=why):
            catalog.build(name, 4, chosen)
