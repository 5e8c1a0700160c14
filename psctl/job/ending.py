"""How a job ends; the phases are the table ENDING in lifecycle.py.

Whatever happens, in whatever order: nothing is started once the job ends, every phase has a deadline, and the log gets
exactly one `finished`, as its last event.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from psctl.job import events, failures, leaving, lifecycle, training
from psctl.job.instructions import Close, Discard
from psctl.job.messages import Exited, Failure, Leave, StopProcesses, StopWanted
from psctl.job.table import Ending, Job, Rank
from psctl.words import Member

DRAIN = 60.0
"""Seconds for servers to send what workers asked them to save, and for disks to take it."""

SLACK = 5.0
"""Seconds beyond the grace in which agents must have told that their processes are gone."""

STOP_EXITS = {"Ctrl-C": 130, "SIGTERM": 143}
"""Exit codes of those who follow a job that they stopped themselves; for all others it is 1."""


def fail(job: Job, failure: Failure) -> None:
    """Something failed: the job ends, after a moment to hear who failed first."""
    end = job.ending or _begin(job, "failed", "settling", failures.SETTLE_LOSS)
    if end.phase == "settling":
        end.failures.append(failure)


def stop(job: Job, wanted: StopWanted) -> None:
    """Someone wants the job to end."""
    if job.ending is not None and (job.ending.phase in ("closing", "closed") or not wanted.force):
        return
    job.say(f"stop wanted by {wanted.by}" + (", at once" if wanted.force else ""))
    if job.ending is not None:
        if job.ending.phase == "settling":
            _verdict(job, job.ending)
        _kill(job, 0.0, f"stopped by {wanted.by}")
        return
    saving = wanted.save or job.order.checkpoint.on_stop
    if not wanted.force and saving and training.propose(job, save=True, stop=True):
        end = _begin(job, "stopped", "cutting", job.order.stall_timeout)
    else:
        if wanted.save:
            job.say("nothing is saved: training has not begun" if not wanted.force else "nothing is saved")
        end = _begin(job, "stopped", "killing", 0.0)
        _kill(job, 0.0 if wanted.force else job.grace, f"stopped by {wanted.by}")
    end.by, end.saving = wanted.by, saving


def exited(job: Job, rank: Rank, message: Exited) -> None:
    """A process ended."""
    if rank.ended:
        return
    if message.failure is not None and rank.joined:
        training.moved(job, rank, message.failure.step)
    failure = message.failure or job.failure(rank, f"ended with status {message.status}", status=message.status)
    trouble = message.status != 0 or (rank.member.role == "server" and job.ending is None)
    error = failure.exception if trouble else ""
    if job.ending is None or job.ending.phase == "settling":
        job.move_rank(rank, "failed" if trouble else "ended", error)
        if trouble:
            fail(job, _with_step(job, failure, rank))
        elif job.ending is None and not job.live("worker"):
            _begin(job, "done", "draining", DRAIN)
    elif message.status == 0:
        job.move_rank(rank, "ended")
    else:
        job.move_rank(rank, "stopped" if job.ending.phase == "killing" else "failed", error)
        if job.ending.phase == "cutting":
            job.say(f"{job.where(rank)} failed while the job was stopped: {error}")
            _kill(job, job.grace, "a worker failed at the stop")
    training.agreed(job, job.saves.without(rank.member))
    if not rank.connected:
        training.give_up(job, {rank.member})
    advance(job)


def disconnected(job: Job, member: Member, reason: str) -> None:
    """A connection ended: of an agent, with it its host; of another, its agent will tell more."""
    if member.role == "agent":
        _host_lost(job, member.rank, reason)
    elif member in job.ranks:
        rank = job.ranks[member]
        rank.connected, rank.lost_at = False, job.now
        training.agreed(job, job.saves.without(member))
        training.give_up(job, {member})
    advance(job)


def _host_lost(job: Job, host: int, reason: str) -> None:
    if host not in job.registered or host in job.lost_hosts:
        return
    job.lost_hosts.add(host)
    job.saves.copying.clear()  # the copy was on its way to one of them, or will be told by CopySent
    name = job.order.hosts[host].name
    there = [rank for rank in job.ranks.values() if rank.host == host and not rank.ended]
    for rank in there:
        job.move_rank(rank, "lost", f"{name} is lost")
        training.agreed(job, job.saves.without(rank.member))
        training.give_up(job, {rank.member})
    if there:
        fail(job, job.failure(there[0], f"HostLost: {name} is lost, or psctl's agent there died: {reason}"))
    elif job.ending is None:
        job.say(f"{name} is lost ({reason}); nothing of the job was there")


def _with_step(job: Job, failure: Failure, rank: Rank) -> Failure:
    """Add the step where the process could not tell it: under bsp no rank is more than one from another."""
    known = max(rank.step, job.reports.step) if rank.joined else 0
    return failure if failure.step else replace(failure, step=known)


# ---- phases --------------------------------------------------------------------------------------------------------


def _begin(job: Job, outcome: str, phase: str, seconds: float) -> Ending:
    job.ending = Ending(outcome, phase, job.now, job.now + seconds)
    job.move("ending")
    return job.ending


def _to(job: Job, trigger: str, seconds: float) -> None:
    assert job.ending is not None
    job.ending.phase = lifecycle.move(lifecycle.ENDING, job.ending.phase, trigger)
    job.ending.deadline = job.now + seconds


def _kill(job: Job, grace: float, reason: str) -> None:
    _to(job, "kill", grace + SLACK)
    for agent in job.agents:
        job.tell(agent, StopProcesses(grace, reason))


def advance(job: Job) -> None:
    """Go on ending as far as possible now; called after everything that happens."""
    while job.ending is not None and _advance_once(job, job.ending):
        pass


def _advance_once(job: Job, end: Ending) -> bool:
    """Take one phase's step if its time has come; return whether it did."""
    late = job.now >= end.deadline
    alive = [rank for rank in job.ranks.values() if not rank.ended and _could_live(job, rank)]
    if end.phase == "settling":
        if not (failures.settled(end.failures, end.since, job.now) or late or not alive):
            return False
        _verdict(job, end)
        _kill(job, job.grace, f"{end.failures[0].member} failed")
    elif end.phase == "cutting" and (late or not job.live("worker")):
        if late:
            job.say(f"the workers did not reach a common step within {job.order.stall_timeout:.0f} s")
            _kill(job, job.grace, "the stop took too long")
        else:
            _to(job, "workers gone", DRAIN)
    elif end.phase == "draining" and (late or not _sending(job)):
        _to(job, "saved", job.grace + SLACK)
        for rank in job.live("server"):
            job.tell(rank.member, Leave("the job is over"))
    elif end.phase == "leaving" and alive and late:
        _kill(job, job.grace, "the job is over")
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


def _could_live(job: Job, rank: Rank) -> bool:
    return rank.host in job.registered and rank.host not in job.lost_hosts and "starting" in job.first


def _sending(job: Job) -> bool:
    """Is a part of a checkpoint, or a last report, still on its way?"""
    return any(rank.connected for rank in job.of("worker")) or any(
        not save.committing for save in job.saves.open.values()
    )


def _give_up_saves(job: Job) -> None:
    for step, save in list(job.saves.open.items()):
        if not save.committing:
            del job.saves.open[step]
            job.out.append(Discard(step))
            job.saves.problem = f"the checkpoint of step {step} was not finished"


def _verdict(job: Job, end: Ending) -> None:
    end.first = _cause(job, failures.first(end.failures))
    for rank in job.ranks.values():
        name = str(rank.member)
        if name == end.first.member or rank.state == "lost":
            kind = events.WorkerLost if rank.member.role == "worker" else events.ServerLost
            reason = end.first.exception
            job.append(kind(time=job.time, rank=rank.member.rank, host=job.host(rank), reason=reason))
        if name != end.first.member and (not rank.ended or rank.state == "failed"):
            end.stopped.append(name)


def _cause(job: Job, first: Failure) -> Failure:
    """Return what the first failure comes from: one that only lost somebody may have lost a worker that left early."""
    gone = leaving.early(job, first.step + 1) if failures.is_loss(first) else None
    return leaving.blamed(job, gone, f"{first.member}: {first.exception}") if gone is not None else first


def _finish(job: Job, end: Ending) -> None:
    training.progress(job)
    for rank in job.ranks.values():
        if not rank.ended:  # it was never started
            job.move_rank(rank, "stopped")
    last = max([job.reports.step, *(rank.step for rank in job.of("worker"))])
    if end.outcome == "stopped" and _all_finished(job) and (end.cut is None or last < end.cut):
        end.outcome = "done"  # the script reached its end before the stop reached it
    job.tell_coordinator("done")
    job.move(end.outcome)
    job.append(
        events.Finished(
            time=job.time, status=end.outcome, exit=_exit(end), steps=max(0, last - job.first_step),
            seconds=job.now - job.began,
            metrics=training.final_metrics(job), failure=_failure(job, end),
        )
    )  # fmt: skip
    end.phase = lifecycle.move(lifecycle.ENDING, end.phase, "finished")
    job.out.append(Close(end.outcome))


def _all_finished(job: Job) -> bool:
    return all(rank.finished and rank.state == "done" for rank in job.of("worker"))


def _exit(end: Ending) -> int:
    if end.outcome == "done":
        return 0
    if end.outcome == "stopped":
        return next((code for name, code in STOP_EXITS.items() if end.by.startswith(name)), 1)
    assert end.first is not None
    return failures.exit_code(end.first)


def _failure(job: Job, end: Ending) -> dict[str, Any] | None:
    if end.first is not None and end.outcome == "failed":
        return failures.document(end.first, job.order.name, end.stopped, job.saves.checkpoint())
    if end.outcome == "stopped" and end.saving and job.saves.problem:
        return {"exception": job.saves.problem, "checkpoint": job.saves.checkpoint()}
    return None
