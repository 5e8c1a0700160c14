"""How a job ends; the phases are the table ENDING in lifecycle.py.

Whatever happens, in whatever order: nothing is started once the job ends, every phase has a deadline, and the log gets
exactly one `finished`, as its last event.
"""

from __future__ import annotations

from typing import Any

from psctl.coordinator.state import departures, stacks, training
from psctl.coordinator.state.instructions import CloseCoordinator, DiscardCheckpoint
from psctl.coordinator.state.job_state import Ending, JobState
from psctl.job import events, failures, lifecycle
from psctl.job.process_messages import ProcessFailure, StopProcesses, StopWanted
from psctl.job.training_messages import Leave

DRAIN = 60.0
"""Seconds for servers to send what workers asked them to save, and for disks to take it."""

SLACK = 5.0
"""Seconds beyond the grace in which agents must have told that their processes are gone."""

STOP_EXITS = {"Ctrl-C": 130, "SIGTERM": 143}
"""Exit codes of those who follow a job that they stopped themselves; for all others it is 1."""


def fail(job: JobState, *found: ProcessFailure, since: float | None = None) -> None:
    """The job ends of these failures, after a moment to hear who failed first. Only losses.py calls this: it asks first
    whether the job may survive.

    Args:
        since: when the first of them was heard of; None: now.
    """
    if job.ending is None:
        begin(job, "failed", "settling", failures.SETTLE_LOSS).since = job.now if since is None else since
    end = job.ending
    assert end is not None
    if end.phase == "settling":
        end.failures += found


def stop(job: JobState, wanted: StopWanted) -> None:
    """Someone wants the job to end."""
    if job.ending is not None and (job.ending.phase in ("closing", "closed") or not wanted.force):
        return
    if job.stop_wanted is None or wanted.force:
        job.say(f"stop wanted by {wanted.by}" + (", at once" if wanted.force else ""))
    if job.ending is not None:
        if job.ending.phase == "settling":
            _verdict(job, job.ending)
        kill(job, 0.0, f"stopped by {wanted.by}")
        return
    saving = wanted.save or job.order.checkpoint.on_stop
    if saving and not wanted.force and job.recovery is None and job.replacing:
        if job.stop_wanted is None:  # without it the others do not come to a common step
            job.say(f"the stop waits until {', '.join(map(job.where, job.replacing))} trains again")
        job.stop_wanted = wanted
        return
    job.stop_wanted = None
    if not wanted.force and saving and job.recovery is None and training.propose(job, save=True, stop=True):
        end = begin(job, "stopped", "cutting", job.order.stall_timeout)
    else:
        if wanted.save:
            job.say("nothing is saved: training has not begun" if not wanted.force else "nothing is saved")
        end = begin(job, "stopped", "killing", 0.0)
        kill(job, 0.0 if wanted.force else job.grace, f"stopped by {wanted.by}")
    end.by, end.saving = wanted.by, saving


# ---- phases --------------------------------------------------------------------------------------------------------


def begin(job: JobState, outcome: str, phase: str, seconds: float) -> Ending:
    """Begin to end: the phases that follow are the table's."""
    job.recovery = None
    job.ending = Ending(outcome, phase, job.now, job.now + seconds)
    job.move("ending")
    return job.ending


def _to(job: JobState, trigger: str, seconds: float) -> None:
    assert job.ending is not None
    job.ending.phase = lifecycle.move(lifecycle.ENDING, job.ending.phase, trigger)
    job.ending.deadline = job.now + seconds


def kill(job: JobState, grace: float, reason: str) -> None:
    """Have the agents end everything."""
    _to(job, "kill", grace + SLACK)
    for agent in job.agents:
        job.tell(agent, StopProcesses(grace, reason))


def advance(job: JobState) -> None:
    """Go on ending as far as possible now; called after everything that happens."""
    while job.ending is not None and _advance_once(job, job.ending):
        pass


def _advance_once(job: JobState, end: Ending) -> bool:
    """Take one phase's step if its time has come; return whether it did."""
    late = job.now >= end.deadline
    alive = job.alive()
    if end.phase == "settling":
        if not (failures.settled(end.failures, end.since, job.now) or late or not alive):
            return False
        _verdict(job, end)
        kill(job, job.grace, f"{end.failures[0].member} failed")
    elif end.phase == "cutting" and (late or not job.live("worker")):
        if late:
            job.say(f"the workers did not reach a common step within {job.order.stall_timeout:.0f} s")
            kill(job, job.grace, "the stop took too long")
        else:
            _to(job, "workers gone", DRAIN)
    elif end.phase == "draining" and (late or not _sending(job)):
        _to(job, "saved", job.grace + SLACK)
        for rank in job.live("server"):
            job.tell(rank.member, Leave("the job is over"))
    elif end.phase == "leaving" and alive and late:
        kill(job, job.grace, "the job is over")
    elif end.phase in ("leaving", "killing") and (not alive or (late and end.phase == "killing")):
        for rank in alive:
            job.move_rank(rank, "lost", "its agent did not tell that it ended")
        _give_up_saves(job)
        _to(job, "gone", DRAIN)
    elif end.phase == "closing" and (late or not job.saves.pending()):
        _finish(job, end)
    else:
        return False
    return True


def _sending(job: JobState) -> bool:
    """Is a part of a checkpoint, or a last report, still on its way?"""
    return any(rank.connected for rank in job.of("worker")) or any(
        not save.committing for save in job.saves.open.values()
    )


def _give_up_saves(job: JobState) -> None:
    for step, save in list(job.saves.open.items()):
        if not save.committing:
            del job.saves.open[step]
            job.out.append(DiscardCheckpoint(step))
            job.saves.problem = f"the checkpoint of step {step} was not finished"


def _verdict(job: JobState, end: Ending) -> None:
    end.first = cause(job, end.failures)
    for rank in job.ranks.values():
        name = str(rank.member)
        if name == end.first.member or rank.state == "lost":
            kind = events.WorkerLost if rank.member.role == "worker" else events.ServerLost
            reason = end.first.exception
            job.append(kind(time=job.time, rank=rank.member.rank, host=job.host(rank), reason=reason))
        if name != end.first.member and not rank.ended:
            end.stopped.append(name)


def cause(job: JobState, found: list[ProcessFailure]) -> ProcessFailure:
    """Return what failures come from: one that only lost somebody may have lost a worker that left early."""
    first = failures.first(found)
    gone = departures.early(job, first.step + 1) if failures.is_loss(first) else None
    return departures.blamed(job, gone, f"{first.member}: {first.exception}") if gone is not None else first


def _finish(job: JobState, end: Ending) -> None:
    training.progress(job)
    for rank in job.ranks.values():
        if not rank.ended:  # it was never started
            job.move_rank(rank, "stopped")
    last = job.reached
    if end.outcome == "stopped" and _all_finished(job) and (end.cut is None or last < end.cut):
        end.outcome = "done"  # the script reached its end before the stop reached it
    job.tell_coordinator("done")
    job.move(end.outcome)
    job.append(
        events.Finished(
            time=job.time, status=end.outcome, exit=_exit(end), steps=max(0, last - job.base),
            seconds=job.now - job.began,
            metrics=training.final_metrics(job), failure=_failure(job, end),
        )
    )  # fmt: skip
    end.phase = lifecycle.move(lifecycle.ENDING, end.phase, "finished")
    job.out.append(CloseCoordinator(end.outcome))


def _all_finished(job: JobState) -> bool:
    return all(rank.finished and rank.state == "done" for rank in job.of("worker"))


def _exit(end: Ending) -> int:
    if end.outcome == "done":
        return 0
    if end.outcome == "stopped":
        return next((code for name, code in STOP_EXITS.items() if end.by.startswith(name)), 1)
    assert end.first is not None
    return failures.exit_code(end.first)


def _failure(job: JobState, end: Ending) -> dict[str, Any] | None:
    if end.first is not None and end.outcome == "failed":
        others = {each.member: each for each in end.failures if each.member != end.first.member}
        told = failures.document(end.first, job.order.name, end.stopped, job.saves.checkpoint(), others.values())
        return {**told, "stacks": stacks.document(job)} if job.stacks_asked is not None else told
    if end.outcome == "stopped" and end.saving and job.saves.problem:
        return {"exception": job.saves.problem, "checkpoint": job.saves.checkpoint()}
    return None
