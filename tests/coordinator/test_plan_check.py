"""The first steps compared with the plan: the measurement, the event, and the strategy that the job changes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    FindRestorable,
    Instruction,
    MakePlan,
    PlanAgain,
    PlanMade,
    PlanRemade,
    RestorableFound,
    TakenOver,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CutPosition, ProposeCut, SaveBegin, SaveEnd
from psctl.job.training_messages import BackwardStepsChosen, MemberReady, Prepare, Resume, WorkerReport
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.driven_job import LAYOUT, ORDER, PLAN, DrivenJob, appended, sent
from tests.helpers.orders import make_hosts

W = [Member("worker", rank) for rank in range(2)]
AUTO = replace(ORDER, hosts=make_hosts(1, 1), strategy="auto", restarts=3)
REPLAN = replace(AUTO, replan=True)


def remade(candidates: Sequence[events.PlanCandidate]) -> PlanRemade:
    return PlanRemade(PlanMade("ring", "worker", [], replace(PLAN, candidates=list(candidates))))


def candidate(strategy: str, seconds: float | None, feasible: bool = True) -> events.PlanCandidate:
    return events.PlanCandidate(strategy, {}, 0.1, 1, 1.0, "", feasible, None, step_seconds=seconds)


class PlannedJob(DrivenJob):
    """A job of two workers on two hosts, with what its plan predicts."""

    def agent_of(self, member: Member) -> Member:
        return Member("agent", self.machine.job.ranks[member].host)

    def starts(self, chosen: str, **prepared: Any) -> list[Instruction]:
        """Start all workers' newest incarnations, with this strategy, up to training."""
        self.workers = [rank.member for rank in self.machine.job.ranks_of("worker")]
        new: list[Instruction] = []
        for worker in self.workers:
            new += [*self.joins(worker), *self.receive(worker, Prepare(LAYOUT, (), **prepared))]
        self.handle(PlanMade(chosen, "worker", [], replace(PLAN, chosen=chosen)))
        for worker in self.workers:
            self.receive(worker, MemberReady())
        assert self.machine.job.training
        return new

    def steps(self, last: int, compute: float = 1.0, sync: float = 1.0) -> list[Instruction]:
        """Both workers report up to a step; the second one computes half as long, and waits for the first."""
        new = []
        for worker, part in zip(self.workers, (1.0, 0.5), strict=True):
            parts = (compute * part, sync + compute * (1 - part))
            new += self.receive(worker, WorkerReport(last, 0, [], 10.0, *parts, ()))
        return new

    def measured(self, step_seconds: float) -> list[Instruction]:
        """Report 30 steps of 10 ms of compute and the given length; return the instructions of the last report."""
        first = self.machine.job.progress.first_step
        self.steps(first + 10)
        return self.steps(first + 40, 0.3, 30 * step_seconds - 0.3)

    def changes(self, step: int) -> list[Instruction]:
        """All workers come to a common step, save and leave; return the start of all."""
        (propose, *_) = [each for _, each in sent(self.instructions[-9:], ProposeCut)]
        for worker in self.workers:
            self.receive(worker, CutPosition(propose.ticket, step - 1))
        for worker in self.workers:
            self.receive(worker, SaveBegin(step, []))
            self.receive(worker, SaveEnd(step))
            self.exits(worker, 0)
        new = self.handle(CheckpointCommitted(step, f"/c/{step}", 8, 0.1))
        assert FindRestorable() in new
        return self.handle(RestorableFound(Resume(f"digits-3@{step}", step, {}, [])))


def job(order: JobOrder = AUTO, chosen: str = "ring", **prepared: Any) -> PlannedJob:
    made = PlannedJob(order)
    made.register()
    made.starts(chosen, **prepared)
    return made


def again(new: list[Instruction]) -> list[MakePlan]:
    return [each.wanted for each in new if isinstance(each, PlanAgain)]


def test_the_plan_is_made_again_with_the_compute_of_the_slowest_worker() -> None:
    made = job()
    assert again(made.steps(4)) == [], "the first steps warm up"
    assert again(made.steps(8, 100.0, 100.0)) == [], "steps count from the first report after those"
    assert again(made.steps(18, 0.2, 0.1)) == []
    (wanted,) = again(made.steps(28, 0.2, 0.1))
    assert wanted.order.compute == pytest.approx(0.02)
    assert (wanted.layout, wanted.on_gpus, wanted.hooked) == (LAYOUT, False, False)
    assert again(made.steps(60)) == [], "once"


@pytest.mark.parametrize(("update", "in_parts"), [("worker", False), ("sharded", True)])
def test_what_runs_is_what_is_predicted(update: str, in_parts: bool) -> None:
    made = job()
    made.machine.job.plan = replace(made.machine.job.plan, update=update)
    made.steps(8)
    (wanted,) = again(made.steps(38))
    assert wanted.in_parts is in_parts


@pytest.mark.parametrize(
    ("predicted", "said"), [(0.1, False), (0.081, False), (0.124, False), (0.079, True), (0.126, True)]
)
def test_a_quarter_of_difference_is_said(predicted: float, said: bool) -> None:
    made = job()
    made.measured(0.1)
    new = made.handle(remade([candidate("ring", predicted), candidate("ps", 0.099)]))
    found = appended(new, events.PlanChecked)
    assert len(found) == said
    for each in found:
        assert (each.chosen, each.fastest, each.changes, each.steps) == ("ring", "ring", False, 30)
        assert (each.predicted, each.fastest_seconds) == (predicted, 0.1)
        assert (each.measured, each.compute) == (pytest.approx(0.1), pytest.approx(0.01))


def test_less_than_two_milliseconds_are_no_difference() -> None:
    made = job()
    made.steps(10)
    made.steps(40, 0.03, 0.03)
    assert appended(made.handle(remade([candidate("ring", 0.0005)])), events.PlanChecked) == []


def test_a_faster_strategy_is_named_and_taken_only_under_replan() -> None:
    made = job()
    made.measured(0.1)
    table = [candidate("ring", 0.1), candidate("ps", 0.07), candidate("tree", 0.01, feasible=False)]
    new = made.handle(remade(table))
    (found,) = appended(new, events.PlanChecked)
    assert (found.fastest, found.fastest_seconds, found.changes) == ("ps", 0.07, False)
    assert sent(new, ProposeCut) == []


def test_the_job_changes_to_the_fastest_at_a_checkpoint_and_back_to_the_best_that_was_measured() -> None:
    made = job(REPLAN)
    table = [candidate("ring", 0.05), candidate("ps", 0.04), candidate("tree", 0.06), candidate("one-shot", 0.0605)]
    took = ["ring"]
    for measured in (0.1, 0.2, 0.3, 0.1):
        made.measured(measured)
        step = made.machine.job.progress.reports.step + 2
        new = made.handle(remade(table))
        (found,) = appended(new, events.PlanChecked)
        assert (found.chosen, found.measured) == (took[-1], pytest.approx(measured))
        assert found.changes == (len(took) < 4)
        if found.changes:
            made.changes(step)
            (plan,) = [each for each in made.starts(found.fastest) if isinstance(each, MakePlan)]
            assert (plan.order.strategy, plan.order.compute) == (found.fastest, pytest.approx(0.01))
            assert made.machine.job.progress.first_step == step
            took.append(found.fastest)
    assert took == ["ring", "ps", "tree", "ring"], "two are tried; the best that was measured stays"
    restored = appended(made.instructions, events.Restored)
    assert [(each.lost, each.reason) for each in restored] == [(0, "")] * 3
    assert appended(made.instructions, events.WorkerLost) == []
    assert made.machine.job.losses.survived == 0


def test_strategies_that_are_predicted_to_be_as_fast_are_not_tried() -> None:
    made = job(REPLAN)
    made.measured(0.1)
    new = made.handle(remade([candidate("ring", 0.05), candidate("tree", 0.05), candidate("ps", 0.052)]))
    (found,) = appended(new, events.PlanChecked)
    assert (found.fastest, found.changes) == ("ring", False)


def test_a_loop_of_the_scripts_own_cannot_change() -> None:
    made = job(REPLAN, hooked=True)
    made.measured(0.1)
    new = made.handle(remade([candidate("ring", 0.05), candidate("tree", 0.04)]))
    (found,) = appended(new, events.PlanChecked)
    assert not found.changes
    assert made.machine.job.restart is None


def test_a_loss_while_the_plan_is_made_leaves_the_strategy() -> None:
    made = job(REPLAN)
    made.measured(0.1)
    made.exits(W[1], -9, "killed by signal 9 (SIGKILL)")
    new = made.handle(remade([candidate("ring", 0.05), candidate("tree", 0.04)]))
    assert appended(new, events.PlanChecked) == []
    assert made.machine.job.scaling.new_order is None


def test_a_coordinator_that_takes_over_measures_anew() -> None:
    made = job()
    assert again(made.measured(0.1))
    made.handle(TakenOver(4711, 0))
    assert again(made.steps(60)) == [], "steps count from the first report after that"
    (wanted,) = again(made.steps(90))
    assert wanted.order.compute is not None


def test_a_plan_that_cannot_be_made_is_said_and_changes_nothing() -> None:
    made = job(REPLAN)
    made.measured(0.1)
    new = made.handle(PlanRemade(PlanMade("", "", [], None, "no such host")))
    assert [each.text for each in appended(new, events.Notice)] == [
        "the first steps are not compared with the plan: no such host"
    ]
    assert made.machine.job.restart is None


def test_workers_that_have_left_do_not_count() -> None:
    made = job()
    made.steps(10)
    made.machine.job.plan_check.reported[9] = made.machine.job.plan_check.reported[0]  # a rank that has left
    assert len(again(made.steps(40))) == 1, "only live workers count"


@pytest.mark.parametrize("replan", [False, True])
def test_steps_on_one_host_are_measured_under_replan_only(replan: bool) -> None:
    made = job(replace(AUTO, hosts=make_hosts(2), replan=replan))
    assert len(again(made.measured(0.1))) == replan


def test_one_worker_has_no_plan_to_check() -> None:
    made = DrivenJob(replace(REPLAN, hosts=make_hosts(1)))
    made.register()
    made.joins(W[0])
    made.receive(W[0], Prepare(LAYOUT, ()))
    made.handle(PlanMade("native", "worker", [], replace(PLAN, chosen="native")))
    made.receive(W[0], MemberReady())
    for step in (10, 40, 90):
        assert again(made.report(W[0], step)) == []


def test_steps_of_periods_are_measured_over_several_periods() -> None:
    made = job(replace(AUTO, period=10))
    made.steps(10)
    assert again(made.steps(49)) == []
    assert len(again(made.steps(50))) == 1


def test_buckets_that_are_tried_are_not_measured() -> None:
    made = job(replace(AUTO, bucket=0))
    made.steps(10)
    assert again(made.steps(60)) == []
    made.machine.job.progress.bucket_size = 1_000_000
    made.steps(70)
    assert len(again(made.steps(100))) == 1


@pytest.mark.parametrize(
    ("chosen", "order"), [("ps", replace(AUTO, bucket=0)), ("native", replace(AUTO, step_in_backward=True))]
)
def test_a_strategy_under_which_nothing_is_tried_is_measured_at_once(chosen: str, order: JobOrder) -> None:
    made = job(order, chosen)
    made.steps(10)
    assert len(again(made.steps(60))) == 1


def test_steps_in_backward_that_are_tried_are_not_measured_and_their_number_is_an_event() -> None:
    made = job(replace(AUTO, step_in_backward=True))
    made.steps(10)
    assert again(made.steps(60)) == []
    for worker in made.workers:
        made.receive(worker, BackwardStepsChosen(0, 8, ((0, 1.5), (2, 2.0))))
    made.steps(70)
    assert len(again(made.steps(100))) == 1
    (chosen,) = appended(made.instructions, events.StepsInBackward)
    assert (chosen.buckets, chosen.all) == (0, 8)
    assert [(each.buckets, each.seconds) for each in chosen.measured] == [(0, 1.5), (2, 2.0)]
