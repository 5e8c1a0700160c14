"""Deadlines: what must have happened by now, and who is named when it has not.

Every wait of the job has its owner here: agents that register, processes that start, ranks that join and prepare,
servers that listen, start values that arrive, steps that move.
"""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state import culprits, departures, ending, losses, stacks, table_placement, training
from psctl.coordinator.state import stragglers as late
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.process_messages import ProcessFailure

STALL_NOTICE = 30.0
"""Seconds without a new step after which a rank is named: longer than an interpreter lock is ever held (20 s)."""

NAMED = 4
"""Ranks that one sentence names at most."""

LOST_SLACK = 10.0
"""Seconds between the end of a process's connection and the report of its exit by its agent; both take a second."""


def tick(job: JobState) -> None:
    """Look at the time."""
    if job.ending is None:
        _total(job)
    if job.stop_wanted is not None and not (job.replacing and job.recovery is None):
        ending.stop(job, job.stop_wanted)
    if job.ending is None and job.recovery is None:
        _start(job)
        _idle(job)
        _tables(job)
        _connections(job)
        if job.training:
            _vain(job)
            late.look(job)
            _stalls(job)
            if job.saves.due(job.now) and not job.replacing:
                training.propose(job, save=True, stop=False)
    if job.now - job.progress_at >= job.order.report_seconds and job.training:
        job.progress_at = job.now
        training.progress(job)
    training.states(job)


def _timed_out(job: JobState, rank: Rank | None, text: str) -> None:
    hint = "timeouts: in the job file says how long to wait"
    if rank is not None:
        failure = job.failure(rank, f"TimedOut: {text}", code="timed-out", exit=5, hint=hint)
        failure = replace(failure, frames=stacks.frames(job, rank.member))
    else:
        host = next((index for index in range(len(job.order.hosts)) if index not in job.registered), 0)
        failure = ProcessFailure(
            member=f"agent/{host}", host=job.order.hosts[host].name, status=0, time=job.time, step=0,
            exception=f"TimedOut: {text}", frames=[], tail=[], code="timed-out", exit=5, hint=hint,
        )  # fmt: skip
    losses.fail(job, failure)


def _total(job: JobState) -> None:
    limit = job.order.total_timeout
    if limit is not None and job.now - job.began >= limit:
        _timed_out(job, job.of("worker")[0], f"the job has run for {limit:.0f} s, all that timeouts.total allows")


def _start(job: JobState) -> None:
    """Name the first rank that keeps the job from starting."""
    if job.ending is not None or job.training:
        return
    limit = job.order.start_timeout
    if job.state == "placing" and job.now - job.began >= limit:
        names = [host.name for index, host in enumerate(job.order.hosts) if index not in job.registered]
        _timed_out(job, None, f"no word from psctl's agent on {', '.join(names)} for {limit:.0f} s")
        return
    for stage, missing, text in _stages(job):
        gone = [rank for rank in missing if rank.ended]
        if stage == "prepared" and gone:
            losses.fail(job, job.failure(gone[0], "ended before it called prepare, which other workers have done"))
            return
        if stage in job.first and missing and job.now - job.first[stage] >= limit:
            who = ", ".join(job.where(rank) for rank in missing)
            _timed_out(job, missing[0], f"{who} {text} within {limit:.0f} s")
            return


def _idle(job: JobState) -> None:
    """End a job whose script does not tell its steps when no worker prints or uses the processor any more."""
    workers = job.live("worker")
    if job.ending is not None or job.training or "prepared" in job.first or not workers:
        return
    limit = job.order.stall_timeout
    if not all(rank.pid and job.now - rank.active >= limit for rank in workers):
        job.stacks_asked = None
    elif stacks.gathered(job, workers):
        names = ", ".join(job.where(rank) for rank in workers[:NAMED])
        more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
        text = f"{names}{more} printed nothing and used no processor for {limit:.0f} s, which timeouts.stall allows"
        _timed_out(job, workers[0], text)


def _stages(job: JobState) -> list[tuple[str, list[Rank], str]]:
    workers, servers = job.of("worker"), job.of("server")
    decided, prepared = "decided" in job.first, "planning" in job.first
    return [
        ("starting", [rank for rank in workers if not rank.pid and not rank.ended], "did not start"),
        (
            "joined",
            [rank for rank in workers if not (rank.joined or rank.ended)],
            "did not call psctl.init as others did",
        ),
        (
            "prepared",
            [rank for rank in workers if rank.prepared is None] if "prepared" in job.first and not prepared else [],
            "did not call prepare as others did",
        ),
        ("planning", [rank for rank in servers if rank.address is None], "did not begin to listen"),
        ("decided", [rank for rank in workers if decided and not rank.ready], "did not get the start values"),
    ]


def _tables(job: JobState) -> None:
    """Name the first server that keeps a worker from opening a store."""
    late = table_placement.missing(job)
    if job.ending is None and late and job.now - job.tables.since >= job.order.start_timeout:
        text = f"{job.where(late[0])} did not begin to hold tables within {job.order.start_timeout:.0f} s"
        _timed_out(job, late[0], text)


def _connections(job: JobState) -> None:
    for rank in job.ranks.values():
        if rank.ended or rank.connected or rank.lost_at is None or rank.finished:
            continue
        if job.now - rank.lost_at >= LOST_SLACK:
            text = f"ConnectionLost: {job.where(rank)} runs, but its connection to the coordinator is lost"
            losses.fail(job, job.failure(rank, text, code="connection-failed"))
            return


def _vain(job: JobState) -> None:
    failure = departures.waited_for_in_vain(job) if job.ending is None else None
    if failure is not None:
        losses.fail(job, failure)


def _stalls(job: JobState) -> None:
    """Name those that ranks whose step stands still wait for, and end the job when it stands still too long."""
    still = [
        rank
        for rank in job.live("worker")
        if rank.connected and not rank.finished and job.now - rank.moved >= min(STALL_NOTICE, job.order.stall_timeout)
    ]
    if job.ending is not None:
        return
    if not still:
        job.stacks_asked = None
        return
    named = culprits.culprits(job, still)
    since = min(rank.moved for rank in still)
    new = [rank for rank in named if ("stall", (rank.member, rank.step)) not in job.noticed]
    for rank in new:
        job.say_once(("stall", (rank.member, rank.step)), _standstill(job, rank, since))
    if job.now - since < job.order.stall_timeout:
        job.stacks_asked = None
        stacks.ask(job, new)
    elif stacks.gathered(job, [*job.live("worker"), *(each for each in named if each.member.role == "server")]):
        gone = [f"{each.member} ended at step {each.step}" for each in job.of("worker") if each.ended or each.finished]
        unknown = [f"{each.member}: no stack, {why}" for each in named if (why := stacks.problem(job, each.member))]
        text = "; ".join([*(_standstill(job, rank, since) for rank in named), *gone, *unknown])
        _timed_out(job, named[0], f"{text}; timeouts.stall is {job.order.stall_timeout:.0f} s")


def _standstill(job: JobState, rank: Rank, since: float) -> str:
    """Say since when a rank has kept others: a worker does so by its step, a server since a worker first waited."""
    if rank.member.role == "server":
        return f"{job.where(rank)} keeps workers waiting since {job.now - since:.0f} s: {late.last(job, rank)}"
    return f"{job.where(rank)} is at step {rank.step} since {job.now - rank.moved:.0f} s: {late.last(job, rank)}"
