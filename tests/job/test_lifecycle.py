"""The tables of states have no transition out of an end, and no state that cannot be reached."""

from __future__ import annotations

import pytest

from psctl.job.lifecycle import ENDED, ENDING, JOB, OVER, RANK, RECOVERY, Table, move


@pytest.mark.parametrize(
    ("table", "starts", "finals"),
    [
        (JOB, {"submitted"}, OVER),
        (RANK, {"starting"}, ENDED),
        (ENDING, {"settling", "cutting", "draining"}, {"closed"}),
        (RECOVERY, {"settling", "leaving"}, {"over"}),
    ],
)
def test_every_state_is_reached_and_every_end_is_final(table: Table, starts: set[str], finals: frozenset[str]) -> None:
    reached = starts | {state for triggers in table.values() for state in triggers.values()}
    assert reached == set(table)
    assert {state for state, triggers in table.items() if not triggers} == set(finals)


def test_the_states_are_those_that_are_promised() -> None:
    assert list(JOB) == ["submitted", "placing", "starting", "running", "stopping", "done", "failed", "stopped"]
    assert set(RANK) == {"starting", "running", "waiting", "done", "failed", "lost", "stopped"}


def test_the_error_of_an_impossible_move_names_the_possible_ones() -> None:
    assert move(RANK, "starting", "started") == "running"
    with pytest.raises(AssertionError, match=r"'go' in state 'done': only \[\] are possible"):
        move(RANK, "done", "go")
