"""Compares the first steps of training with the plan, and changes the strategy at a checkpoint where another is faster.

The plan is made before the first step: it knows the machines and links, and seldom the compute of a step. After STEPS
steps both are measured, and the plan is made again with the measured compute, so that it predicts whole steps. Where
the measured step differs from the predicted one by more than TOLERANCE, the event `plan-check` says so.

Under `sync.replan` the job changes its strategy when another one's step is shorter by more than TOLERANCE. What is
known of a strategy is its measured step, where it has run, else its prediction. Where links are slower than they were
when the plan was made, all predictions are too short; so at most TRIALS strategies are tried for their prediction, none
that is predicted to be as fast as one that has run, and the last change goes to the best that was measured. All workers
go to a common step, save and leave, and all processes start from that checkpoint (restart.py): no step is lost.

The first steps of a run warm up (allocation, connections, buckets that are tried), so SKIPPED of them do not count. A
worker's reports cover whole intervals, so its steps are counted from one report to another. Steps in which a worker is
lost or joins count for nothing: the measurement begins anew. On one host compute and sums want the same cores, which
the plan does not model; there the first steps are measured under `sync.replan` only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import joining_workers, losses
from psctl.coordinator.state.instructions import MakePlan, PlanAgain, PlanRemade
from psctl.job import events
from psctl.job.training_messages import WorkerReport

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

STEPS = 20
"""Steps that are measured; with `sync.period` at least PERIODS periods."""

PERIODS = 4

SKIPPED = 5
"""First steps that are not measured."""

TOLERANCE = 1.25
"""Ratio of a measured step to its prediction, and of two strategies' steps, beyond which psctl acts."""

TRIALS = 2
"""Strategies that are tried because of their prediction; one more change may go back to the best that was measured."""

ALIKE = 1.05
"""Ratio of predictions up to which a strategy is taken to be as fast as one that has run, and is not tried."""

LEAST = 0.002
"""Seconds by which a step must differ: shorter ones are as long as the scheduling of processes delays them."""


class ReportedSteps(msgspec.Struct):
    """Steps that a worker reported after its first report, and seconds of all of them."""

    last: int
    """The last step of the reports so far."""
    steps: int = 0
    compute: float = 0.0
    sync: float = 0.0


class MeasuredStep(msgspec.Struct, frozen=True):
    """A step of the job: the steps that were measured, seconds of one, and of its compute on the slowest worker."""

    steps: int
    seconds: float
    compute: float


class PlanCheck(msgspec.Struct):
    """The measurement of the first steps, and what is known of strategies."""

    reported: dict[int, ReportedSteps] = {}
    """By rank of a worker."""
    measured: MeasuredStep | None = None
    """Known when the plan is made again."""
    compared: bool = False
    seconds: dict[str, float] = {}
    """Measured seconds of a step, of each strategy that has run."""
    changes: int = 0
    """Changes of the strategy so far."""


def begin(job: JobState) -> None:
    """All processes have started: measure their first steps."""
    job.plan_check = PlanCheck(seconds=job.plan_check.seconds, changes=job.plan_check.changes)


def _choosing(job: JobState, strategy: str) -> bool:
    """Whether the workers still measure a choice of theirs, in steps that differ from those that follow.

    Under `ps` there are no buckets, and no step in backward under `native`, so nothing is chosen.
    """
    sizes = job.order.bucket == 0 and strategy != "ps" and not job.progress.bucket_size
    early = job.order.step_in_backward and strategy != "native" and job.progress.backward_steps is None
    return sizes or early


def on_report(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """Add a worker's report to its steps; have the plan made again when all have enough."""
    check = job.plan_check
    if check.measured is not None or job.plan is None or job.plan.event is None:
        return
    if len(job.order.hosts) == 1 and not job.order.replan:
        return
    if not job.training or job.all_processes_end:
        return
    if joining_workers.is_changing(job) or job.joining.members:
        check.reported.clear()
        return
    if message.step < job.progress.first_step + SKIPPED or _choosing(job, job.plan.chosen):
        return
    found = check.reported.get(rank.member.rank)
    if found is None:
        check.reported[rank.member.rank] = ReportedSteps(message.step)
    elif math.isfinite(message.compute_seconds + message.sync_seconds):
        found.steps += max(0, message.step - found.last)
        found.last = max(found.last, message.step)
        found.compute += max(0.0, message.compute_seconds)
        found.sync += max(0.0, message.sync_seconds)
    check.measured = _measured(job)
    if check.measured is not None:
        prepared = [each.prepared for each in job.live("worker") if each.prepared is not None]
        layout = job.startup.layout
        assert layout is not None, "the job trains"
        on_gpus, hooked = any(each.on_gpus for each in prepared), any(each.hooked for each in prepared)
        order = replace(job.order, compute=check.measured.compute)
        in_parts = job.plan.update == "sharded"  # else the prediction is not of what was measured
        job.instructions.append(PlanAgain(MakePlan(layout, order, on_gpus, hooked, in_parts)))


def _measured(job: JobState) -> MeasuredStep | None:
    """Return a step of the job once all workers have reported enough steps; of a single worker, never."""
    found = [job.plan_check.reported.get(each.member.rank) for each in job.live("worker")]
    enough = max(STEPS, PERIODS * job.order.period)
    workers = [each for each in found if each is not None and each.steps >= enough]
    if len(workers) < max(2, len(found)):
        return None
    return MeasuredStep(
        min(each.steps for each in workers),
        sum((each.compute + each.sync) / each.steps for each in workers) / len(workers),
        max(each.compute / each.steps for each in workers),
    )


def on_remade(job: JobState, remade: PlanRemade) -> None:
    """Compare the measured step with the plan that knows its compute."""
    check, plan, measured = job.plan_check, job.plan, job.plan_check.measured
    if measured is None or check.compared or plan is None or job.restart is not None or job.ending is not None:
        return
    check.compared = True
    if remade.plan.event is None:
        job.notice(f"the first steps are not compared with the plan: {remade.plan.problem}")
        return
    able = [each for each in remade.plan.event.candidates if each.feasible]
    predicted = {each.strategy: each.step_seconds for each in able if each.step_seconds is not None}
    if plan.chosen not in predicted:
        return  # nothing predicts it
    check.seconds[plan.chosen] = measured.seconds
    fastest, seconds = _fastest(check, plan.chosen, predicted)
    may = job.order.replan and fastest != plan.chosen and check.changes <= TRIALS
    changes = may and _change_strategy(job, fastest, measured.compute)
    expected = predicted[plan.chosen]
    as_planned = not (_is_slower(measured.seconds, expected) or _is_slower(expected, measured.seconds))
    if as_planned and fastest == plan.chosen:
        return
    job.append_event(
        events.PlanChecked(
            time=job.time, step=job.progress.reports.step, steps=measured.steps, chosen=plan.chosen,
            predicted=expected, measured=measured.seconds, compute=measured.compute, fastest=fastest,
            fastest_seconds=seconds, changes=changes,
        )
    )  # fmt: skip


def _fastest(check: PlanCheck, chosen: str, predicted: dict[str, float]) -> tuple[str, float]:
    """Return the strategy with the shortest step, and its seconds; the chosen one unless it is clearly slower."""
    known = {name: seconds for name, seconds in check.seconds.items() if name in predicted}
    if check.changes < TRIALS:
        ran = [predicted[name] for name in known]
        for name, seconds in predicted.items():
            if all(max(seconds, each) > ALIKE * min(seconds, each) for each in ran):
                known[name] = seconds
    fastest = min(known, key=lambda name: known[name])
    return (fastest, known[fastest]) if _is_slower(known[chosen], known[fastest]) else (chosen, known[chosen])


def on_taken_over(job: JobState) -> None:
    """The plan that was being made again was lost with the old coordinator: measure anew."""
    if job.plan_check.measured is not None and not job.plan_check.compared:
        begin(job)


def _is_slower(seconds: float, other: float) -> bool:
    return seconds > TOLERANCE * other and seconds - other >= LEAST


def _change_strategy(job: JobState, strategy: str, compute: float) -> bool:
    """Have all workers go to a common step, save and leave; restart.py starts them with the strategy.

    Return False where that is not possible: a script's own DistributedDataParallel has the loop, or all have finished.
    """
    order = replace(job.order, strategy=strategy, compute=compute)
    changes = losses.restart_at_common_step(job, order, f"strategy {strategy}")
    job.plan_check.changes += changes
    return changes
