"""The end of a job; the phases are the table ENDING in lifecycle.py.

Whatever happens, in whatever order: no process is started once the job ends, every phase has a deadline, and the log
gets exactly one `finished`, as its last event.

A worker that leaves early, while others still train, is a cause of failures too: under bsp every clock needs every
worker, so one that alone breaks out of its loop, or calls sys.exit(0) or os._exit(0), leaves the rest waiting. The
failure then names that worker, not those that wait or lose their connection to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints, joining_workers
from psctl.coordinator.state.instructions import CloseCoordinator, DiscardCheckpoint
from psctl.job import events, failures, lifecycle
from psctl.job.process_messages import ProcessFailure, StopProcesses, StopWanted
from psctl.job.training_messages import Leave

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

DRAIN = 60.0
"""Seconds for servers to send the parts of the last checkpoint, and for disks to take them."""

UPLOAD = 1800.0
"""Further seconds for `checkpoint.to` to take the last checkpoints; one that refuses them is given up much earlier."""

SLACK = 5.0
"""Seconds beyond the grace in which agents must report that their processes have ended."""

EARLY_LEAVE_WAIT = 10.0
"""Seconds for which all others wait before a worker that left is named: no last step on servers takes so long."""

STOP_EXITS = {"Ctrl-C": 130, "SIGTERM": 143}
"""Exit codes of the psctl that stopped the job itself; for all others it is 1."""

HINT = "let every rank make as many steps as the others: look for a break, sys.exit or os._exit that only one reaches"


class Ending(msgspec.Struct):
    """How the job is ending."""

    outcome: str  # done | failed | stopped
    phase: str
    since: float
    deadline: float
    by: str = ""  # the person or signal that stopped it
    failures: list[ProcessFailure] = msgspec.field(default_factory=list)
    first: ProcessFailure | None = None
    stopped: list[str] = msgspec.field(default_factory=list)
    saving: bool = False  # a checkpoint was requested with the stop
    common_step: int | None = None  # after which all workers were ordered to leave


def fail(job: JobState, *found: ProcessFailure, since: float | None = None) -> None:
    """End the job of these failures, after a moment in which an earlier one may be reported.

    Only losses.py calls this: it decides first whether the job survives.

    Args:
        job: the job.
        found: the failures.
        since: when the first of them was reported; None: now.
    """
    end = job.ending
    if end is None:
        end = begin(job, "failed", "settling", failures.SETTLE_LOSS)
        end.since = job.now if since is None else since
    if end.phase == "settling":
        end.failures += found


def stop(job: JobState, wanted: StopWanted) -> None:
    """Stop the job on a request by a person or a signal."""
    end = job.ending
    if end is not None and (end.phase in ("closing", "closed") or not wanted.force):
        return
    if job.pending_stop is None or wanted.force:
        job.notice(f"stop wanted by {wanted.by}" + (", at once" if wanted.force else ""))
    if end is not None:
        if end.phase == "settling":
            _decide(job, end)
        kill(job, 0.0, f"stopped by {wanted.by}")
        return
    saving = wanted.save or job.order.checkpoint.on_stop
    can_save = saving and not wanted.force and job.restart is None
    if can_save and joining_workers.is_changing(job):
        if job.pending_stop is None:  # meanwhile the others do not come to a common step
            names = ", ".join(map(job.describe, job.workers_being_replaced))
            job.notice("the stop waits until " + (f"{names} trains again" if names else "the workers have changed"))
        job.pending_stop = wanted
        return
    job.pending_stop = None
    if can_save and checkpoints.propose_step(job, save=True, stop=True):
        end = begin(job, "stopped", "cutting", job.order.stall_timeout)
    else:
        if wanted.save:
            job.notice("nothing is saved: training has not begun" if not wanted.force else "nothing is saved")
        end = begin(job, "stopped", "killing", 0.0)
        kill(job, 0.0 if wanted.force else job.grace, f"stopped by {wanted.by}")
    end.by, end.saving = wanted.by, saving


# ---- phases --------------------------------------------------------------------------------------------------------


def begin(job: JobState, outcome: str, phase: str, seconds: float) -> Ending:
    """Begin to end in a phase of the table; further phases follow from there."""
    job.restart = None
    job.ending = Ending(outcome, phase, job.now, job.now + seconds)
    job.move("ending")
    return job.ending


def _move(job: JobState, trigger: str, seconds: float) -> None:
    assert job.ending is not None
    job.ending.phase = lifecycle.move(lifecycle.ENDING, job.ending.phase, trigger)
    job.ending.deadline = job.now + seconds


def kill(job: JobState, grace: float, reason: str) -> None:
    """Have the agents end all processes."""
    _move(job, "kill", grace + SLACK)
    for agent in job.agents:
        job.send(agent, StopProcesses(grace, reason))


def advance(job: JobState) -> None:
    """Take all phases of the end that are possible now; called after every input."""
    while job.ending is not None and _advance_once(job, job.ending):
        pass


def _advance_once(job: JobState, end: Ending) -> bool:
    """Go to the next phase if its time has come; return whether it has."""
    late = job.now >= end.deadline
    running = job.running()
    if end.phase == "settling":
        if not (failures.settled(end.failures, end.since, job.now) or late or not running):
            return False
        _decide(job, end)
        kill(job, job.grace, f"{end.failures[0].member} failed")
    elif end.phase == "cutting" and (late or not job.live("worker")):
        if late:
            job.notice(f"the workers did not reach a common step within {job.order.stall_timeout:.0f} s")
            kill(job, job.grace, "the stop took too long")
        else:
            _move(job, "workers gone", DRAIN)
    elif end.phase == "draining" and (late or not (_is_sending(job) or job.live("reader"))):
        _move(job, "saved", job.grace + SLACK)
        for rank in job.live("server"):
            job.send(rank.member, Leave("the job is over"))
    elif end.phase == "leaving" and running and late:
        kill(job, job.grace, "the job is over")
    elif end.phase in ("leaving", "killing") and (not running or (late and end.phase == "killing")):
        for rank in running:
            job.move_rank(rank, "lost", "its agent did not report its end")
        _drop_uncommitted(job)
        _move(job, "gone", DRAIN + (UPLOAD if job.order.checkpoint.to is not None else 0.0))
    elif end.phase == "closing" and (late or not job.checkpoints.is_pending()):
        _finish(job, end)
    else:
        return False
    return True


def _is_sending(job: JobState) -> bool:
    """Whether a part of a checkpoint, or a last report, may still arrive."""
    return any(rank.connected for rank in job.ranks_of("worker")) or any(
        not save.committing for save in job.checkpoints.open.values()
    )


def _drop_uncommitted(job: JobState) -> None:
    for step, save in list(job.checkpoints.open.items()):
        if not save.committing:
            del job.checkpoints.open[step]
            job.instructions.append(DiscardCheckpoint(step))
            job.checkpoints.problem = f"the checkpoint of step {step} was not finished"


def _decide(job: JobState, end: Ending) -> None:
    """Decide which failure was the first."""
    end.first = cause(job, end.failures)
    append_losses(job, end.first)
    names = [str(rank.member) for rank in job.ranks.values() if not rank.ended]
    end.stopped += [name for name in names if name != end.first.member]


def append_losses(job: JobState, first: ProcessFailure) -> None:
    """Append an event for the rank that failed first and for each rank that was lost with its host."""
    for rank in job.ranks.values():
        if str(rank.member) == first.member or rank.state == "lost":
            job.append_loss(rank, first.exception)


def _finish(job: JobState, end: Ending) -> None:
    job.progress.append(job)
    for rank in job.ranks.values():
        if not rank.ended:  # it was never started
            job.move_rank(rank, "stopped")
    last = job.furthest_step
    all_done = all(rank.finished and rank.state == "done" for rank in _stayed(job))
    if end.outcome == "stopped" and all_done and (end.common_step is None or last < end.common_step):
        end.outcome = "done"  # the script reached its end before the stop reached it
    job.append_coordinator_state("done")
    job.move(end.outcome)
    job.append_event(
        events.Finished(
            time=job.time, status=end.outcome, exit=_exit_code(end), steps=max(0, last - job.progress.base_step),
            seconds=job.now - job.began,
            metrics=job.progress.final_metrics(), failure=_failure(job, end),
        )
    )  # fmt: skip
    end.phase = lifecycle.move(lifecycle.ENDING, end.phase, "finished")
    job.instructions.append(CloseCoordinator(end.outcome))


def _exit_code(end: Ending) -> int:
    if end.outcome == "done":
        return 0
    if end.outcome == "stopped":
        return next((code for name, code in STOP_EXITS.items() if end.by.startswith(name)), 1)
    assert end.first is not None
    return failures.exit_code(end.first)


def _failure(job: JobState, end: Ending) -> dict[str, object] | None:
    newest = job.checkpoints.newest_name()
    if end.first is not None and end.outcome == "failed":
        others = {each.member: each for each in end.failures if each.member != end.first.member}
        document = failures.document(end.first, job.order.name, end.stopped, newest, others.values())
        found = job.stalls.document()
        return document if found is None else {**document, "stacks": found}
    if end.outcome == "stopped" and end.saving and job.checkpoints.problem:
        return {"exception": job.checkpoints.problem, "checkpoint": newest}
    return None


# ---- workers that leave early --------------------------------------------------------------------------------------


def cause(job: JobState, found: list[ProcessFailure]) -> ProcessFailure:
    """Return the first cause of failures: the loss of a peer may be caused by a worker that left early."""
    first = failures.first(found)
    gone = _left_early(job, first.step + 1) if failures.is_loss(first) else None
    return _blame(job, gone, f"{first.member}: {first.exception}") if gone is not None else first


def find_early_leaver(job: JobState) -> ProcessFailure | None:
    """Return a failure when all remaining workers have long waited because one left early."""
    remaining = [rank for rank in job.live("worker") if not rank.finished]
    stuck = all(rank.doing.startswith("sync") and job.now - rank.moved_at >= EARLY_LEAVE_WAIT for rank in remaining)
    gone = _left_early(job, max((rank.step for rank in job.ranks_of("worker")), default=0))
    if not remaining or not stuck or gone is None:
        return None
    first = remaining[0]
    return _blame(job, gone, f"{job.describe(first)} is at step {first.step}, {first.doing}")


def _left_early(job: JobState, steps: int) -> Rank | None:
    """Return the first worker that left before it made so many steps, None when none did."""
    gone = [
        rank for rank in _stayed(job) if job.training and (rank.step < steps if rank.finished else rank.state == "done")
    ]
    return min(gone, key=lambda rank: rank.step, default=None)


def _stayed(job: JobState) -> list[Rank]:
    """Return the workers without those that left because fewer were wanted."""
    return [rank for rank in job.ranks_of("worker") if not rank.leaving]


def _blame(job: JobState, rank: Rank, others: str) -> ProcessFailure:
    how = f"left after step {rank.step}" if rank.finished else "ended with status 0 in the middle of training"
    return job.failure_of(rank, f"{job.describe(rank)} {how}, while others continue: {others}", hint=HINT)
