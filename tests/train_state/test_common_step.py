"""Workers agree on a common step before that step ends."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import TimedOut
from psctl.train_state.common_step import StepActions, StepAgreement


def test_a_step_without_a_cut_ends_without_action() -> None:
    cuts = StepAgreement(0)
    assert cuts.begin_step_end(1) == StepActions()


def test_the_answer_is_the_step_in_progress() -> None:
    cuts = StepAgreement(4)
    assert cuts.position(1) == 5
    cuts.begin_step_end(5)
    assert cuts.position(2) == 5, "its end is decided, but it goes on"
    cuts.finish_step_end(5)
    assert cuts.position(3) == 6


def test_a_worker_that_answered_ends_its_step_and_waits_in_the_next() -> None:
    cuts = StepAgreement(4, timeout=0.01)
    cuts.position(1)
    assert cuts.begin_step_end(5) == StepActions()
    cuts.finish_step_end(5)
    with pytest.raises(TimedOut, match="did not name it"):
        cuts.begin_step_end(6)


def test_the_cut_is_returned_at_its_step() -> None:
    cuts = StepAgreement(4)
    cuts.position(1)
    threading.Timer(0.02, cuts.add_cut, (1, 6, StepActions(save=True, stop=True))).start()
    assert cuts.begin_step_end(5) == StepActions()
    cuts.finish_step_end(5)
    assert cuts.begin_step_end(6) == StepActions(save=True, stop=True)


def test_two_cuts_at_one_step_are_both_returned() -> None:
    cuts = StepAgreement(0)
    cuts.add_cut(1, 2, StepActions(save=True))
    cuts.add_cut(2, 2, StepActions(stop=True))
    assert cuts.begin_step_end(1) == StepActions()
    assert cuts.begin_step_end(2) == StepActions(save=True, stop=True)
    assert cuts.begin_step_end(3) == StepActions()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 3))
def test_every_worker_receives_the_cut_before_its_step_ends(ahead, more) -> None:
    """Workers answer at different steps, and continue as far as they may before they receive the cut."""
    workers = []
    for steps in ahead:
        cuts = StepAgreement(0, timeout=0.0)
        for step in range(1, steps + 1):
            cuts.begin_step_end(step)
            cuts.finish_step_end(step)
        workers.append((cuts, steps))
    at = max(cuts.position(1) for cuts, _ in workers) + 1
    for cuts, steps in workers:
        step = steps
        for _ in range(more):
            try:
                assert cuts.begin_step_end(step + 1) == StepActions()
            except TimedOut:
                break
            cuts.finish_step_end(step + 1)
            step += 1
        assert step < at
        cuts.add_cut(1, at, StepActions(save=True))
        for later in range(step + 1, at):
            assert cuts.begin_step_end(later) == StepActions()
            cuts.finish_step_end(later)
        assert cuts.begin_step_end(at) == StepActions(save=True)
