"""Who is gone, and what becomes of the job: it survives a loss, or it ends of a failure.

A *loss* is the death of a process or of its host from outside: killed, crashed, vanished, out of reach. What a user's
code did itself (an exception, an exit status) it would do again, so the job ends of it at once. Which of the two it was
is known only after a moment (failures.py), since deaths cause each other; until then the restart is *settling*, and a
failure that is no loss, and follows from none, turns it into the job's end. A job survives `restart.max` losses.
"""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state import ending, example_division, surviving, training
from psctl.coordinator.state.job_state import JobState, Rank, Recovery
from psctl.job import failures, lifecycle
from psctl.job.process_messages import EndProcesses, ProcessExited, ProcessFailure
from psctl.types import Member

USED_UP = "restart.max in the job file says how many losses a job survives"


def fail(job: JobState, failure: ProcessFailure, *, counted: bool = False) -> None:
    """Something failed: the job starts again, or ends.

    Args:
        job: the job.
        failure: what.
        counted: it is a loss that the job had gone on from (surviving.py), so it is known and counted already.
    """
    if job.recovery is not None and job.recovery.phase == "leaving":
        job.recovery = None  # it starts again all the same, from the checkpoint before
    recovery = job.recovery
    if job.ending is not None:
        ending.fail(job, failure)
    elif recovery is not None and (failures.is_death(failure) or failures.may_follow(failure, recovery.failures)):
        recovery.failures.append(failure)
    elif not failures.is_death(failure):
        give_up(job, [*(recovery.failures if recovery is not None else []), failure])
    elif counted:
        job.recovery = Recovery("settling", job.now, job.now, [failure], counted=True)
    elif job.losses >= job.order.restarts:
        ending.fail(job, replace(failure, hint=failure.hint or _used_up(job)))
    else:
        job.recovery = Recovery("settling", job.now, job.now + failures.SETTLE_LOSS, [failure])


def give_up(job: JobState, found: list[ProcessFailure]) -> None:
    """The job does not start again: it ends of these failures."""
    if job.recovery is not None:
        job.recovery.phase = lifecycle.move(lifecycle.RECOVERY, job.recovery.phase, "give up")
    ending.fail(job, *found, since=job.recovery.since if job.recovery is not None else job.now)


def _used_up(job: JobState) -> str:
    if job.order.restarts == 0:
        return ""
    return f"the job has survived {job.losses} losses, and no more: {USED_UP}"


def exited(job: JobState, rank: Rank, message: ProcessExited) -> None:
    """A process ended."""
    if rank.ended:
        return
    if message.failure is not None and rank.joined:
        training.moved(job, rank, message.failure.step)
    failure = message.failure or job.failure(rank, f"ended with status {message.status}", status=message.status)
    failure = replace(failure, member=str(rank.member), host=job.host(rank))  # an agent speaks for its own host
    early = rank.member.role == "server" and job.ending is None and not rank.leaving
    trouble = early or (message.status != 0 and not rank.leaving)
    error = failure.exception if trouble else ""
    if job.recovery is not None and job.recovery.phase not in ("settling", "leaving"):
        job.move_rank(rank, "stopped")  # as it was told to
    elif job.ending is None or job.ending.phase == "settling":
        job.move_rank(rank, "failed" if trouble else "ended", error)
        if trouble and _goes_on(job, rank, failure):
            pass
        elif trouble:
            fail(job, _with_step(job, failure, rank))
        elif job.ending is None and job.recovery is None and not job.live("worker"):
            ending.begin(job, "done", "draining", ending.DRAIN)
    elif message.status == 0:
        job.move_rank(rank, "ended")
    else:
        job.move_rank(rank, "stopped" if job.ending.phase == "killing" else "failed", error)
        if job.ending.phase == "cutting":
            job.say(f"{job.where(rank)} failed while the job was stopped: {error}")
            ending.kill(job, job.grace, "a worker failed at the stop")
    training.agreed(job, job.saves.without(rank.member))
    example_division.without(job, rank.member)
    if not rank.connected:
        training.give_up(job, {rank.member})


def _goes_on(job: JobState, rank: Rank, failure: ProcessFailure) -> bool:
    """A signal is nobody's consequence: what can be survived on the spot need not settle."""
    killed = failure.status < 0 or rank.member.role == "server"
    return killed and failures.is_death(failure) and surviving.goes_on(job, [rank], _with_step(job, failure, rank))


def disconnected(job: JobState, member: Member, reason: str) -> None:
    """A connection ended: of an agent, with it its host; of another, its agent will tell more."""
    if member.role == "agent":
        _host_lost(job, member.rank, reason)
    elif member in job.ranks:
        rank = job.ranks[member]
        rank.connected, rank.lost_at = False, job.now
        training.agreed(job, job.saves.without(member))
        training.give_up(job, {member})


def broke(job: JobState, member: Member, reason: str) -> None:
    """A member sent what it may not send: it is treated as lost, and its process is ended."""
    if member in job.refused:
        return
    job.refused.add(member)
    rank = job.ranks.get(member)
    who = job.where(rank) if rank is not None else str(member)
    job.say(f"{who} is refused: {reason}")
    if rank is not None and not rank.ended:
        job.tell(Member("agent", rank.host), EndProcesses([member], 0.0, reason))
    disconnected(job, member, reason)


def _host_lost(job: JobState, host: int, reason: str) -> None:
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
        text = f"{failures.HOST_LOST}: {name} is lost, or psctl's agent there died: {reason}"
        failure = job.failure(there[0], text)
        if not surviving.goes_on(job, there, failure):
            fail(job, failure)
    elif job.ending is None:
        job.say(f"{name} is lost ({reason}); nothing of the job was there")


def _with_step(job: JobState, failure: ProcessFailure, rank: Rank) -> ProcessFailure:
    """Add the step where the process could not tell it: under bsp no rank is more than one from another."""
    known = max(rank.step, job.reports.step) if rank.joined else 0
    return failure if failure.step else replace(failure, step=known)
