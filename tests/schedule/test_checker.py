"""The proof refuses each kind of wrong schedule, with its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from psctl.schedule import checker
from psctl.schedule.checker import ScheduleError
from psctl.schedule.contracts import Collective
from psctl.schedule.schedule import Transfer
from tests.helpers.proofs import prove

PSCTL = Path(__file__).resolve().parents[2] / "psctl"


def move(step: int, source: int, destination: int, chunk: int = 0, *, add: bool = False, lane: int = 0) -> Transfer:
    return Transfer(step, source, destination, chunk, "reduce" if add else "copy", lane)


def refused(
    collective: Collective, world: int, transfers: list[Transfer], chunks: int = 1, nodes: int | None = None
) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        prove("broken", collective, world, transfers, (1,) * chunks, nodes=nodes)
    return caught.value


EXCHANGE = [move(0, 0, 1, add=True), move(0, 1, 0, add=True)]


def test_a_correct_schedule_passes() -> None:
    schedule = checker.prove("pair", 2, EXCHANGE[::-1])
    assert schedule.transfers == tuple(EXCHANGE) and schedule.steps == 1 and schedule.sent(8.0) == (8.0, 8.0)


@pytest.mark.parametrize(
    ("collective", "transfers", "where", "why"),
    [
        ("all-reduce", [*EXCHANGE, move(1, 0, 0)], (1, 0, 0), "to itself"),
        ("all-reduce", [*EXCHANGE, move(1, 0, 1, add=True)], (1, 1, 0), "count ranks 0, 1 twice"),
        ("all-reduce", [EXCHANGE[0], EXCHANGE[0]], (0, 1, 0), "count rank 0 twice"),
        ("all-reduce", [EXCHANGE[0], move(1, 0, 1)], (1, 0, 0), "lacks rank 1"),
        ("all-reduce", [EXCHANGE[0]], (0, 0, 0), "lacks rank 1"),
        ("all-reduce", [*EXCHANGE, move(1, 0, 2)], (1, 2, 0), "takes no part"),
        ("all-reduce", [*EXCHANGE, move(1, -1, 0)], (1, -1, 0), "takes no part"),
        ("all-reduce", [*EXCHANGE, move(1, 0, 1, 1)], (1, 0, 1), "one of only 1 chunks"),
        ("all-reduce", [*EXCHANGE, move(-1, 0, 1)], (-1, 0, 0), "none"),
        ("all-reduce", [*EXCHANGE, move(1, 0, 1, lane=-1)], (1, 0, 0), "none"),
        ("broadcast", [move(0, 1, 0)], (0, 1, 0), "does not hold"),
        ("broadcast", [], (-1, 1, 0), "lacks rank 0"),
    ],
)
def test_each_fault_is_named(
    collective: Collective, transfers: list[Transfer], where: tuple[int, int, int], why: str
) -> None:
    error = refused(collective, 2, transfers)
    if collective == "all-reduce":
        with pytest.raises(ScheduleError) as caught:
            checker.prove("broken", 2, transfers)
        assert str(caught.value) == str(error)
    assert (error.step, error.rank, error.chunk) == where
    assert why in str(error)
    assert f"step {where[0]}, rank {where[1]}, chunk {where[2]}" in str(error)


def test_a_step_reads_what_its_senders_hold_when_it_begins() -> None:
    error = refused("broadcast", 3, [move(0, 0, 1), move(0, 1, 2)])
    assert (error.step, error.rank) == (0, 1)
    prove("chain", "broadcast", 3, [move(0, 0, 1), move(1, 1, 2)])


def test_chunks_that_begin_and_end_alike_are_told_apart_by_their_middle() -> None:
    right = [move(0, 0, 1), move(1, 1, 2), move(2, 2, 3)]
    chunks = [[move(3 * at + one.step, one.source, one.destination, at) for one in right] for at in range(3)]
    prove("chains", "broadcast", 4, [one for each in chunks for one in each], (1,) * 3)
    wrong = [chunks[0], [move(3, 0, 1, 1), move(4, 1, 3, 1), move(5, 2, 3, 1)], chunks[2]]
    error = refused("broadcast", 4, [one for each in wrong for one in each], 3)
    assert (error.step, error.rank, error.chunk) == (5, 2, 1)


def test_chunks_that_move_alike_and_begin_differently_are_told_apart() -> None:
    error = refused("gather", 3, [move(0, 0, 2, 0), move(1, 0, 2, 1)], 3)  # rank 0 holds chunk 0 only
    assert (error.step, error.rank, error.chunk) == (1, 0, 1)


def test_a_copy_must_be_the_only_write_of_its_step() -> None:
    both = [move(0, 0, 1), move(0, 2, 1, add=True)]
    assert "written at once by 0, 2" in str(refused("reduce", 3, both))
    twice = [move(0, 0, 1), move(1, 0, 2), move(1, 1, 2)]
    error = refused("broadcast", 3, twice)
    assert (error.step, error.rank) == (1, 2)


def test_a_helper_that_holds_nothing_cannot_send() -> None:
    error = refused("all-reduce", 2, [move(0, 2, 0)], nodes=3)
    assert "helper 0" in str(error) and "does not hold" in str(error)


def test_the_same_sum_in_another_order_is_refused() -> None:
    """(0 + 1) + 2 at ranks 0 and 2, but 0 + (1 + 2) at rank 1: equal on integers, not to the last bit on floats."""
    # 0: 0+1, then +2     1: 1+2     3 helps: it keeps 0's own value for rank 1, which adds it last
    parted = [
        move(0, 0, 3), move(0, 1, 0, add=True), move(0, 2, 1, add=True),
        move(1, 2, 0, add=True), move(1, 3, 1, add=True), move(2, 0, 2),
    ]  # fmt: skip
    error = refused("all-reduce", 3, parted, nodes=4)
    assert "another order than rank 0" in str(error) and error.rank == 1


def test_three_operands_in_another_order_are_a_different_sum() -> None:
    """Rank 0 adds (0, 1, 2); helper 0 adds (1, 2, 0), because it receives 0's value through helper 1."""
    transfers = [
        move(0, 0, 4), move(1, 1, 0, add=True), move(1, 2, 0, add=True),
        move(1, 1, 3, add=True), move(1, 2, 3, add=True), move(1, 4, 3, add=True),
        move(2, 3, 1), move(2, 0, 2),
    ]  # fmt: skip
    error = refused("all-reduce", 3, transfers, nodes=5)
    assert "another order" in str(error) and error.rank == 1
    prove("one of them", "all-reduce", 3, [*transfers[:-2], move(2, 3, 0), move(2, 3, 1), move(2, 3, 2)], nodes=5)


def test_three_operands_in_one_step_differ_from_two_and_then_one() -> None:
    at_once = [move(0, a, b, add=True, lane=b) for a in range(3) for b in range(3) if a != b]
    prove("at once", "all-reduce", 3, at_once)
    late = [one if (one.source, one.destination) != (0, 2) else move(1, 0, 2, add=True) for one in at_once]
    # Rank 0 has taken others in by step 1, so it can't send its own value any more.
    assert "twice" in str(refused("all-reduce", 3, late))


def test_invalid_world_and_share_numbers_are_refused() -> None:
    for world, shares in [(0, (1,)), (2, ()), (2, (1, 0)), (2, (-1,))]:
        with pytest.raises(ScheduleError, match="make no schedule"):
            checker.prove("none", world, [], shares)
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        prove("none", "reduce-scatter", 2, [], (1, 1, 1))
    with pytest.raises(ValueError, match="root 5"):
        prove("none", "broadcast", 2, [], root=5)


def test_only_the_proof_builds_schedules() -> None:
    for path in PSCTL.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Schedule":
                assert path.name == "checker.py", f"{path}:{node.lineno}"
