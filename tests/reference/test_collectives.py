"""The other collectives keep their contracts, by every algorithm, among all ranks and among groups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import UsageError
from psctl.schedule.checker import ScheduleError
from tests.helpers.reference_player import Values, changes, play
from tests.hypothesis_profile import examples
from tests.reference import barrier, collectives, direct
from tests.reference.collective_schedule import CollectiveSchedule, prove
from tests.reference.collectives import ALGORITHMS, build
from tests.reference.contracts import Group, contract
from tests.reference.groups import within
from tests.reference.scatter_gather import ScatterGather

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]

MOVES = ("broadcast", "scatter", "gather", "all-gather", "all-to-all")


def fits(algorithm: str, world: int) -> bool:
    return algorithm != "halving-doubling" or world & (world - 1) == 0


def number(rank: int, chunk: int) -> int:
    return random.Random(rank * 1000 + chunk).getrandbits(50)


def ends_right(schedule: CollectiveSchedule) -> bool:
    """Return whether a collective has the result of MPI's standard, without the contract's masks."""
    world, chunks, root = schedule.world, len(schedule.shares), schedule.root
    ranks = list(schedule.members or range(world))
    name = schedule.collective

    def has_at_first(rank: int, chunk: int) -> bool:
        if name in ("broadcast", "scatter"):
            return rank == root
        if name in ("gather", "all-gather"):
            return rank == (schedule.owners or ranks)[chunk]
        if name == "all-to-all":
            return rank == ranks[chunk // len(ranks)]
        return True

    start: Values = {
        (rank, chunk): number(rank, chunk) for rank in ranks for chunk in range(chunks) if has_at_first(rank, chunk)
    }
    end = play(start, schedule.transfers, lambda one, other: one + other)
    assert end is not None
    total = [sum(start.get((rank, chunk), 0) for rank in ranks) for chunk in range(chunks)]
    if name in ("broadcast", "all-gather"):
        return all(end.get((rank, chunk)) == total[chunk] for rank in ranks for chunk in range(chunks))
    if name in ("gather", "reduce"):
        return all(end.get((root, chunk)) == total[chunk] for chunk in range(chunks))
    place = (lambda chunk: chunk % len(ranks)) if name == "all-to-all" else (lambda chunk: chunk)
    owners = schedule.owners or ranks
    return all(end.get((owners[place(chunk)], chunk)) == total[chunk] for chunk in range(chunks))


def ends_at_barrier(schedule: CollectiveSchedule) -> bool:
    ranks = schedule.members or range(schedule.world)
    end = play({(rank, 0): 1 << rank for rank in ranks}, schedule.transfers, lambda one, other: one | other)
    return end is not None and all(end[rank, 0] == sum(1 << each for each in ranks) for rank in ranks)


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
@pytest.mark.parametrize("world", range(1, 10))
def test_small_worlds_from_every_root(collective: str, algorithm: str, world: int) -> None:
    if not fits(algorithm, world):
        with pytest.raises(ValueError, match="power of two"):
            build(collective, world, algorithm)
        return
    for root in range(world) if collective in ("broadcast", "reduce", "scatter", "gather") else (0,):
        schedule = build(collective, world, algorithm, root=root, chunks=3)
        assert ends_at_barrier(schedule) if collective == "barrier" else ends_right(schedule)


@settings(max_examples=examples(100))
@given(st.sampled_from(CASES), st.integers(10, 33), st.data())
def test_larger_worlds(case: tuple[str, str], world: int, data: st.DataObject) -> None:
    collective, algorithm = case
    if not fits(algorithm, world):
        world = 16 if world < 24 else 32
    root = data.draw(st.integers(0, world - 1))
    schedule = build(collective, world, algorithm, root=root, chunks=data.draw(st.integers(1, 5)))
    assert ends_at_barrier(schedule) if collective == "barrier" else ends_right(schedule)


@settings(max_examples=examples(100))
@given(st.sampled_from(CASES), st.permutations(range(9)), st.sampled_from([1, 2, 4, 8]))
def test_groups(case: tuple[str, str], ranks: list[int], size: int) -> None:
    whole = build(case[0], size, case[1], root=size - 1, chunks=2)
    schedule = within(whole, Group(tuple(ranks[:size])), 9)
    assert schedule.root == ranks[whole.root]
    assert ends_at_barrier(schedule) if case[0] == "barrier" else ends_right(schedule)
    assert {node for one in schedule.transfers for node in (one.source, one.destination)} <= set(ranks[:size])


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
def test_without_any_one_transfer_it_is_refused(collective: str, algorithm: str) -> None:
    schedule = build(collective, 4, algorithm, root=1, chunks=2)
    harmless = 0
    for index in range(len(schedule.transfers)):
        rest = schedule.transfers[:index] + schedule.transfers[index + 1 :]
        try:
            passed = prove("cut", schedule.collective, 4, rest, schedule.shares, root=1)
        except ScheduleError:
            continue
        harmless += 1
        assert ends_at_barrier(passed) if collective == "barrier" else ends_right(passed)
    # The ring's lap brings the root what it has and all what the scatter gave them; the token tells much twice.
    wasteful = (("broadcast", "scatter-ring"), ("barrier", "token-ring"))
    assert harmless == 0 or (harmless < len(schedule.transfers) and (collective, algorithm) in wasteful)


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
def test_a_changed_transfer_is_refused_or_harmless(collective: str, algorithm: str) -> None:
    dice, refused = random.Random(f"{collective} {algorithm}"), 0
    for world in (2, 4, 8):
        schedule = build(collective, world, algorithm, root=1, chunks=2)
        for index in range(len(schedule.transfers))[:20]:
            for change in changes(schedule, index, dice):
                try:
                    passed = prove(
                        "cut", schedule.collective, world, change.transfers, schedule.shares, root=schedule.root
                    )
                except ScheduleError:
                    refused += 1
                    continue
                right = ends_at_barrier(passed) if collective == "barrier" else ends_right(passed)
                assert right, f"{change.what} of {index} passed"
    assert refused


def test_one_lap_of_the_token_is_no_barrier() -> None:
    prove("token", "barrier", 5, barrier.token_ring(5))
    with pytest.raises(ScheduleError, match="lacks"):
        prove("one lap", "barrier", 5, barrier.token_ring(5)[:5])


def test_a_scatter_ring_reduce_may_be_uneven_and_shares_follow_the_ranks() -> None:
    schedule = build("reduce-scatter", 3, "ring", shares=(5, 1, 2))
    assert schedule.shares == (5, 1, 2) and schedule.ranges(16) == ((0, 10), (10, 12), (12, 16))
    assert ends_right(schedule)


def test_aliases_and_unknown_names() -> None:
    assert build("one-to-all", 3) == build("scatter", 3)
    assert build("all-to-one", 3) == build("gather", 3)
    for collective, algorithm in [("broadcast", "bruck"), ("spread", ""), ("all-reduce", "")]:
        with pytest.raises(UsageError, match=collective):
            build(collective, 3, algorithm)
    for wrong in ({"root": 3}, {"root": -1}, {"chunks": 0}, {"shares": (1, 2)}):
        with pytest.raises(ValueError, match="do not fit"):
            build("broadcast", 3, "chain", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sources", "destinations", "unit", "total", "collective"),
    [
        ((2,), (0, 1, 2), 12, 12, "broadcast"),
        ((2,), (0, 1, 2), 4, 12, "scatter"),
        ((0, 1, 2), (2,), 12, 12, "gather"),
        ((0, 1, 2), (0, 1, 2), 12, 12, "all-gather"),
        ((0, 1, 2), (0, 1, 2), 4, 12, "all-to-all"),
    ],
)
def test_one_primitive_is_five_collectives(
    sources: tuple[int, ...], destinations: tuple[int, ...], unit: int, total: int, collective: str
) -> None:
    """The seeds' table: from the numbers of sources and destinations and the sizes to the collective."""
    primitive = ScatterGather(sources, destinations, unit, total)
    assert primitive.collective == collective
    schedule = direct.build(primitive, 3)
    assert schedule.collective == collective and ends_right(schedule)
    assert ends_right(direct.build(primitive, 3, paced=True))
    for algorithm in ALGORITHMS[collective]:
        if fits(algorithm, 3):
            same = build(collective, 3, algorithm, root=2)
            one, other = (
                contract(given.collective, 3, len(given.shares), 2, given.owners or None) for given in (schedule, same)
            )
            assert len(schedule.shares) != len(same.shares) or (one.precondition, one.postcondition) == (
                other.precondition,
                other.postcondition,
            )


@pytest.mark.parametrize("collective", MOVES)
def test_each_move_is_the_primitive_and_back(collective: str) -> None:
    assert ScatterGather.case(collective, range(4), 3).collective == collective  # type: ignore[arg-type]


def test_what_the_primitive_is_not() -> None:
    for collective in ("reduce", "reduce-scatter", "all-reduce", "barrier"):
        with pytest.raises(ValueError, match="no case"):
            ScatterGather.case(collective, range(4))  # type: ignore[arg-type]
    for sources, destinations, unit, total in [((0,), (0, 1, 2), 5, 12), ((), (1,), 1, 1), ((0, 0), (1,), 1, 1)]:
        with pytest.raises(ValueError, match=r"total|once"):
            ScatterGather(sources, destinations, unit, total)
    with pytest.raises(ValueError, match="same ranks"):
        direct.build(ScatterGather((0, 1), (2, 3), 1, 1), 4)


def test_the_primitive_between_ranks_that_do_not_both_give_and_get() -> None:
    scattered = direct.build(ScatterGather((3,), (0, 2), 4, 8), 4)
    assert scattered.owners == (0, 2) and {one.destination for one in scattered.transfers} == {0, 2}
    gathered = direct.build(ScatterGather((0, 2), (3,), 4, 4), 4)
    assert gathered.root == 3 and {one.source for one in gathered.transfers} == {0, 2}


def test_a_movement_among_a_group_keeps_its_ends() -> None:
    schedule = within(direct.build(ScatterGather((0,), (2, 1), 4, 8), 3), Group((7, 4, 5)), 9)
    assert schedule.owners == (5, 4) and schedule.root == 7
    assert {one.destination: one.chunk for one in schedule.transfers} == {5: 0, 4: 1}


def test_a_contract_covers_its_members_only() -> None:
    expected = contract("all-reduce", 5, 2, members=(1, 3))
    assert (
        set(expected.precondition)
        == set(expected.postcondition)
        == {(rank, chunk) for rank in (1, 3) for chunk in (0, 1)}
    )
    assert set(expected.postcondition.values()) == {0b1010}
    for collective, chunks in [("all-to-all", 10), ("scatter", 4), ("all-gather", 0)]:
        with pytest.raises(ValueError, match="multiple"):
            contract(collective, 3, chunks)  # type: ignore[arg-type]
    for owners in ((0, 1), (0, 1, 4)):
        with pytest.raises(ValueError, match="owner each"):
            contract("reduce-scatter", 3, 3, owners=owners)


def test_a_transpose_is_an_all_to_all() -> None:
    """Row s, column d of a matrix: after it rank d holds column d."""
    world = 5
    end = play(
        {(rank, rank * world + column): (rank, column) for rank in range(world) for column in range(world)},
        build("all-to-all", world, "bruck").transfers, lambda one, other: one,
    )  # fmt: skip
    assert end is not None
    for column in range(world):
        assert [end[column, row * world + column] for row in range(world)] == [(row, column) for row in range(world)]


def test_group_algebra() -> None:
    one, other = Group((4, 1, 2)), Group((2, 3, 4))
    assert one.union(other).ranks == (4, 1, 2, 3) and other.union(one).ranks == (2, 3, 4, 1)
    assert one.intersection(other).ranks == (4, 2) and one.intersection(Group((0,))).ranks == ()
    assert Group.of(None, 3) == Group.whole(3) == Group((0, 1, 2)) and len(one) == 3 and 1 in one and 3 not in one
    for ids, why in [((1, 1), "once"), ((-1,), "once"), ((0, 3), "no rank 3")]:
        with pytest.raises(ValueError, match=why):
            Group.of(ids, 3)
    with pytest.raises(ValueError, match="does not fit"):
        within(build("broadcast", 3), Group((0, 1)), 5)


def test_all_gathers_in_rank_order() -> None:
    for name in ("ring", "bruck", "sharded"):
        assert collectives.in_rank_order(collectives.ALL_GATHERS[name](6)).owners == tuple(range(6))
