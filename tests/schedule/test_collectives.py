"""The other collectives keep their contracts, by every algorithm, among all ranks and among groups."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import UsageError
from psctl.schedule.algorithms import trees
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.algorithms.collectives import ALGORITHMS, build
from psctl.schedule.checker import ScheduleError
from psctl.schedule.contracts import Collective, contract
from psctl.schedule.groups import Group
from psctl.schedule.schedule import Schedule
from tests.helpers.proofs import prove
from tests.helpers.reference_player import Values, changes, play
from tests.hypothesis_profile import examples
from tests.reference import barriers
from tests.reference.scatter_gather import ScatterGather

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]

MOVES = ("broadcast", "scatter", "gather", "all-gather", "all-to-all")


def options(world: int, chunks: int = 3) -> ScheduleOptions:
    """Return options with two trees, one of which is another rank's star."""
    ranks = range(world)
    star = tuple((world - 1, rank) for rank in ranks if rank != world - 1)
    return ScheduleOptions(chunks=chunks, trees=((0, tuple(pairwise(ranks)), 2), (world - 1, star, 1)))


def number(rank: int, chunk: int) -> int:
    return random.Random(rank * 1000 + chunk).getrandbits(50)


def ends_right(schedule: Schedule) -> bool:
    """Return whether a collective has the result of MPI's standard, without the contract's masks."""
    world, chunks, root, name = schedule.world, len(schedule.shares), schedule.root, schedule.collective

    def has_at_first(rank: int, chunk: int) -> bool:
        if name in ("broadcast", "scatter"):
            return rank == root
        if name in ("gather", "all-gather"):
            return rank == chunk
        return rank == chunk // world if name == "all-to-all" else True

    start: Values = {
        (rank, chunk): number(rank, chunk)
        for rank in range(world)
        for chunk in range(chunks)
        if has_at_first(rank, chunk)
    }
    end = play(start, schedule.transfers, lambda one, other: one + other)
    assert end is not None
    total = [sum(start.get((rank, chunk), 0) for rank in range(world)) for chunk in range(chunks)]
    if name in ("broadcast", "all-gather"):
        return all(end.get((rank, chunk)) == total[chunk] for rank in range(world) for chunk in range(chunks))
    if name in ("gather", "reduce"):
        return all(end.get((root, chunk)) == total[chunk] for chunk in range(chunks))
    return all(end.get((chunk % world, chunk)) == total[chunk] for chunk in range(chunks))


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
@pytest.mark.parametrize("world", range(1, 10))
def test_small_worlds_from_every_root(collective: Collective, algorithm: str, world: int) -> None:
    for root in range(world) if collective in ("broadcast", "reduce", "scatter", "gather") else (0,):
        assert ends_right(build(collective, world, algorithm, root=root, options=options(world)))


@settings(max_examples=examples(100))
@given(st.sampled_from(CASES), st.integers(10, 33), st.data())
def test_larger_worlds(case: tuple[Collective, str], world: int, data: st.DataObject) -> None:
    root, chunks = data.draw(st.integers(0, world - 1)), data.draw(st.integers(1, 5))
    assert ends_right(build(case[0], world, case[1], root=root, options=options(world, chunks)))


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
def test_without_any_one_transfer_it_is_refused(collective: Collective, algorithm: str) -> None:
    schedule = build(collective, 4, algorithm, root=1, options=options(4, 2))
    harmless = 0
    for index in range(len(schedule.transfers)):
        rest = schedule.transfers[:index] + schedule.transfers[index + 1 :]
        try:
            passed = prove("cut", collective, 4, rest, schedule.shares, root=1)
        except ScheduleError:
            continue
        harmless += 1
        assert ends_right(passed)
    # The ring's lap brings the root what it has, and all ranks what the scatter gave them.
    wasteful = (collective, algorithm) == ("broadcast", "ring")
    assert harmless == 0 or (harmless < len(schedule.transfers) and wasteful)


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
def test_a_changed_transfer_is_refused_or_harmless(collective: Collective, algorithm: str) -> None:
    dice, refused = random.Random(f"{collective} {algorithm}"), 0
    for world in (2, 4, 8):
        schedule = build(collective, world, algorithm, root=1, options=options(world, 2))
        for index in range(len(schedule.transfers))[:20]:
            for change in changes(schedule, index, dice):
                try:
                    passed = prove("cut", collective, world, change.transfers, schedule.shares, root=schedule.root)
                except ScheduleError:
                    refused += 1
                    continue
                assert ends_right(passed), f"{change.what} of {index} passed"
    assert refused


def ends_at_barrier(schedule: Schedule) -> bool:
    ranks = range(schedule.world)
    end = play({(rank, 0): 1 << rank for rank in ranks}, schedule.transfers, lambda one, other: one | other)
    return end is not None and all(end[rank, 0] == (1 << schedule.world) - 1 for rank in ranks)


@pytest.mark.parametrize("name", barriers.NAMES)
def test_barriers_of_the_textbooks(name: str) -> None:
    for world in range(1, 10):
        assert ends_at_barrier(barriers.build(name, world))


def test_one_lap_of_the_token_is_no_barrier() -> None:
    whole = barriers.build("token-ring", 5)
    lap = Schedule("one lap", 5, 5, (1,), tuple(one for one in whole.transfers if one.step < 5))
    assert ends_at_barrier(whole) and not ends_at_barrier(lap)


def test_a_tree_is_rooted_anew() -> None:
    edges = ((0, 1), (1, 2), (1, 3))
    assert trees.rooted(0, edges) == edges
    assert set(trees.rooted(3, edges)) == {(3, 1), (1, 0), (1, 2)}
    with pytest.raises(ValueError, match="not connected"):
        trees.rooted(0, ((0, 1), (2, 3)))


def test_unknown_names_and_numbers_that_do_not_fit() -> None:
    for collective, algorithm in [("broadcast", "bruck"), ("spread", ""), ("all-reduce", "")]:
        with pytest.raises(UsageError, match=collective):
            build(collective, 3, algorithm)  # type: ignore[arg-type]
    for root, chunks in ((3, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            build("broadcast", 3, "pipelined-chain", root=root, options=ScheduleOptions(chunks=chunks))


@pytest.mark.parametrize("collective", MOVES)
def test_one_primitive_is_five_collectives(collective: Collective) -> None:
    """The seeds' table: from the numbers of sources and destinations and the sizes to the collective."""
    primitive = ScatterGather.case(collective, range(4), 2)
    assert primitive.collective == collective
    chunks = 1 if collective == "broadcast" else primitive.units
    routes = primitive.routes(chunks)
    kept = contract(collective, 4, chunks, 2)
    assert kept.precondition == {(source, chunk): 1 << source for chunk, (source, _) in enumerate(routes)}
    assert kept.postcondition == {
        (rank, chunk): 1 << source for chunk, (source, ranks) in enumerate(routes) for rank in ranks
    }


def test_what_the_primitive_is_not() -> None:
    for collective in ("reduce", "reduce-scatter", "all-reduce"):
        with pytest.raises(ValueError, match="no case"):
            ScatterGather.case(collective, range(4))  # type: ignore[arg-type]
    for sources, destinations, unit, total in [((0,), (0, 1, 2), 5, 12), ((), (1,), 1, 1), ((0, 0), (1,), 1, 1)]:
        with pytest.raises(ValueError, match=r"total|once"):
            ScatterGather(sources, destinations, unit, total)


def test_chunks_that_fit_no_contract() -> None:
    for collective, chunks in [("all-to-all", 10), ("scatter", 4), ("all-gather", 0)]:
        with pytest.raises(ValueError, match=r"multiple|evenly"):
            contract(collective, 3, chunks)  # type: ignore[arg-type]


def test_a_transpose_is_an_all_to_all() -> None:
    """Row s, column d of a matrix: after it rank d holds column d."""
    world = 5
    end = play(
        {(rank, rank * world + column): (rank, column) for rank in range(world) for column in range(world)},
        build("all-to-all", world, "recursive-doubling").transfers, lambda one, other: one,
    )  # fmt: skip
    assert end is not None
    for column in range(world):
        assert [end[column, row * world + column] for row in range(world)] == [(row, column) for row in range(world)]


def test_group_algebra() -> None:
    one, other = Group((4, 1, 2)), Group((2, 3, 4))
    assert (one | other).ranks == (4, 1, 2, 3) and (other | one).ranks == (2, 3, 4, 1)
    assert (one & other).ranks == (4, 2) and (one & Group((0,))).ranks == ()
    assert len(one) == 3 and 1 in one and 3 not in one and list(one) == [4, 1, 2]
    for ids in ((1, 1), (-1,), (True, 0), ("0",)):
        with pytest.raises(ValueError, match="once"):
            Group(ids)  # type: ignore[arg-type]


def test_all_gathers_in_rank_order() -> None:
    for name in ALGORITHMS["all-gather"]:
        assert contract("all-gather", 6, 6).precondition.keys() >= {
            (one.source, one.chunk) for one in build("all-gather", 6, name).transfers if one.step == 0
        }
