"""The interval of `every: auto`: Young's, from the measured cost and the losses."""

from __future__ import annotations

import msgspec
import pytest

from psctl.coordinator.policies.checkpoint_interval import (
    FIRST,
    LIFETIME,
    LONGEST,
    SHORTEST,
    interval,
    mean_time_between_losses,
)
from psctl.job.checkpoint_messages import ProposeCut, SaveBegin, SaveEnd
from psctl.orders import CheckpointOrder
from tests.helpers.driven_job import ORDER, S0, W0, W1, DrivenJob, sent


@pytest.mark.parametrize("cost", [0.05, 0.5, 2.0])
def test_no_other_interval_loses_less_time(cost: float) -> None:
    mean = mean_time_between_losses(16, 3600.0, 2)
    best = interval(cost, mean)
    assert SHORTEST < best < LONGEST

    def lost(every: float) -> float:
        return cost / every + every / (2 * mean)

    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_losses_shorten_it_and_hosts_too() -> None:
    assert mean_time_between_losses(1, 0.0, 0) == LIFETIME
    assert mean_time_between_losses(8, 0.0, 0) == LIFETIME / 8
    assert mean_time_between_losses(8, 3600.0, 3) < mean_time_between_losses(8, 3600.0, 0) / 3.9
    assert interval(0.0, 1.0) == FIRST
    assert (interval(1e-6, 1.0), interval(1e6, 1e6)) == (SHORTEST, LONGEST)


def test_a_job_takes_checkpoints_at_the_interval_of_the_measured_cost() -> None:
    auto = CheckpointOrder(None, 0, 0.0, 3, None, True, 1, every_auto=True)
    job = DrivenJob(msgspec.structs.replace(ORDER, checkpoint=auto)).training()
    assert sent(job.wait(FIRST - 1), ProposeCut) == []
    assert sent(job.wait(1.5), ProposeCut)
    job = DrivenJob(msgspec.structs.replace(ORDER, checkpoint=auto)).training()
    for member, pause in ((W0, 0.02), (W1, 0.5), (S0, 9.0)):  # servers write beside the training
        job.receive(member, SaveBegin(9, []))
        job.receive(member, SaveEnd(9, pause=pause))
    every = job.machine.job.checkpoints.every_seconds
    mean = mean_time_between_losses(2, 0.0, 0)
    assert every == pytest.approx(interval(0.5, mean), rel=0.01)
    for member in (W0, W1):
        job.receive(member, SaveEnd(10, pause=float("nan")))
    assert job.machine.job.checkpoints.every_seconds == pytest.approx(every, rel=0.01), "not to be believed"


def test_only_losses_after_which_all_start_again_shorten_it() -> None:
    auto = CheckpointOrder(None, 0, 0.0, 3, None, True, 1, every_auto=True)
    job = DrivenJob(msgspec.structs.replace(ORDER, checkpoint=auto, restarts=9)).training()
    state = job.machine.job

    def every(step: int) -> float:
        job.receive(W0, SaveBegin(step, []))
        job.receive(W0, SaveEnd(step, pause=0.001))
        return state.checkpoints.every_seconds

    undisturbed = every(9)
    assert undisturbed == pytest.approx(interval(0.001, mean_time_between_losses(2, 0.0, 0)), rel=0.01)
    state.losses.survived = 5  # each on the spot
    assert every(10) == pytest.approx(undisturbed, rel=0.01)
    for worker in (W0, W1):
        job.report(worker, 507, loss=1.0)
    job.killed(W1)
    job.wait(0.4)
    assert (state.losses.survived, state.losses.rolled_back) == (6, 1)
    assert every(508) == pytest.approx(undisturbed / 2**0.5, rel=0.01)
