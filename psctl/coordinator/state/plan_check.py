"""Compares the first steps of training with the plan, and changes the strategy at a checkpoint where another is faster.

The plan is made before the first step: it knows the machines and links, and seldom the compute of a step. After STEPS
steps both are measured, and the plan is made again with the measured compute, so that it predicts whole steps. Where
the measured step differs from the predicted one by more than TOLERANCE, the event `plan-check` says so.

Under `sync.replan` the job changes its strategy when another one's step is shorter by more than TOLERANCE. What is
known of a strategy is its measured step, where it has run, else its prediction. Where links are slower than they were
when the plan was made, all predictions are too short; so at most TRIALS strategies are tried for their prediction, and
the last change goes to the best that was measured. All workers go to a common step, save and leave, and all processes
start from that checkpoint (restart.py): no step is lost.

The first steps of a run warm up (allocation, connections, buckets that are tried), so SKIPPED of them do not count. A
worker's reports cover whole intervals, so its steps are counted from one report to another. Steps in which a worker is
lost or joins count for nothing: the measurement begins anew.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import checkpoints, joining_workers, losses
from psctl.coordinator.state.instructions import PlanAgain, PlanRemade
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

LEAST = 0.002
"""Seconds by which a step must differ: shorter ones are as long as the scheduling of processes delays them."""


class MeasuredSteps(msgspec.Struct):
    """What a worker reported of its measured steps: their number, and seconds of each part."""

    last: int
    """The last step of the reports so far."""
    steps: int = 0
    compute: float = 0.0
    sync: float = 0.0


class PlanCheck(msgspec.Struct):
    """The measurement of the first steps, and what is known of strategies."""

    workers: dict[int, MeasuredSteps] = {}
    asked: bool = False
    """The plan is being made again."""
    done: bool = False
    """The steps since the last start were compared."""
    seconds: dict[str, float] = {}
    """Measured seconds of a step, of each strategy that has run."""
    changes: int = 0
    """Changes of the strategy so far."""


def begin(job: JobState) -> None:
    """All processes have started: measure their first steps."""
    job.plan_check = PlanCheck(seconds=job.plan_check.seconds, changes=job.plan_check.changes)


def on_report(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """Add a worker's report to its measured steps; have the plan made again when all have enough."""
    check, plan = job.plan_check, job.plan
    if check.asked or check.done or plan is None or plan.event is None or not job.training or job.all_processes_end:
        return
    if joining_workers.is_changing(job) or job.joining.members:
        check.workers.clear()
        return
    if message.step < job.progress.first_step + SKIPPED or (job.order.bucket == 0 and not job.progress.bucket_size):
        return
    measured = check.workers.setdefault(rank.member.rank, MeasuredSteps(message.step, -1))
    if measured.steps < 0:  # its first report: steps count from here on
        measured.steps = 0
        return
    if math.isfinite(message.compute_seconds + message.sync_seconds):
        measured.steps += max(0, message.step - measured.last)
        measured.last = message.step
        measured.compute += max(0.0, message.compute_seconds)
        measured.sync += max(0.0, message.sync_seconds)
    live = job.live("worker")
    enough = max(STEPS, PERIODS * job.order.period)
    found = [check.workers.get(each.member.rank) for each in live]
    if len(live) > 1 and all(each is not None and each.steps >= enough for each in found):
        check.asked = True
        prepared = [each.prepared for each in live if each.prepared is not None]
        layout = job.startup.layout
        assert layout is not None, "the job trains"
        on_gpus, hooked = any(each.on_gpus for each in prepared), any(each.hooked for each in prepared)
        order = replace(job.order, compute=_compute(check))
        job.instructions.append(PlanAgain(layout, order, on_gpus, hooked))


def _compute(check: PlanCheck) -> float:
    """Return seconds of compute of a step: those of the slowest worker, for which the others wait."""
    return max(each.compute / each.steps for each in check.workers.values())


def on_remade(job: JobState, remade: PlanRemade) -> None:
    """Compare the measured steps with the plan that knows their compute."""
    check, plan = job.plan_check, job.plan
    if not check.asked or check.done or plan is None or job.restart is not None or job.ending is not None:
        return
    check.done = True
    if remade.problem:
        job.notice(f"the first steps are not compared with the plan: {remade.problem}")
        return
    able = [each for each in remade.candidates if each.feasible]
    predicted = {each.strategy: each.step_seconds for each in able if each.step_seconds is not None}
    if plan.chosen not in predicted:
        return  # nothing predicts it
    workers = list(check.workers.values())
    measured = sum((each.compute + each.sync) / each.steps for each in workers) / len(workers)
    check.seconds[plan.chosen] = measured
    known = {
        name: check.seconds.get(name, seconds)
        for name, seconds in predicted.items()
        if name in check.seconds or check.changes < TRIALS
    }
    fastest = min(known, key=lambda name: known[name])
    if not _is_slower(measured, known[fastest]):
        fastest = plan.chosen
    compute, expected = _compute(check), predicted[plan.chosen]
    may = job.order.replan and fastest != plan.chosen and check.changes <= TRIALS
    changes = may and _change_strategy(job, fastest, compute)
    if fastest != plan.chosen or _is_slower(measured, expected) or _is_slower(expected, measured):
        job.append_event(
            events.PlanChecked(
                time=job.time, step=job.progress.reports.step, steps=min(each.steps for each in workers),
                chosen=plan.chosen, predicted=expected, measured=measured, compute=compute, fastest=fastest,
                fastest_seconds=known[fastest], changes=changes,
            )
        )  # fmt: skip


def on_taken_over(job: JobState) -> None:
    """The plan that was being made again was lost with the old coordinator: measure anew."""
    if job.plan_check.asked and not job.plan_check.done:
        begin(job)


def _is_slower(seconds: float, other: float) -> bool:
    return seconds > TOLERANCE * other and seconds - other >= LEAST


def _change_strategy(job: JobState, strategy: str, compute: float) -> bool:
    """Have all workers go to a common step, save and leave; restart.py starts them with the strategy.

    Return False where that is not possible: a script's own DistributedDataParallel has the loop, or all have finished.
    """
    if not checkpoints.propose_step(job, save=True, stop=True):
        return False
    job.plan_check.changes += 1
    job.scaling.new_order = replace(job.order, strategy=strategy, compute=compute)
    reason = job.failure_of(job.ranks_of("worker")[0], f"the job could not be started again with strategy {strategy}")
    job.restart = losses.Restart("leaving", job.now, job.now + job.order.stall_timeout, [reason])
    return True
