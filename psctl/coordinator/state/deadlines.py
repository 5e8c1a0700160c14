"""Deadlines: the waits of a job that have become too long, and the ranks to name for them.

Every wait of the job ends here: agents that register, processes that start, ranks that join and prepare, servers that
listen, start values that arrive, steps that are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from psctl.coordinator.state import (
    checkpoints,
    collective_losses,
    ending,
    joining_workers,
    losses,
    partitions,
    progress,
    reading_groups,
    scaling,
    stalls,
    table_placement,
    takeover,
)
from psctl.job.process_messages import ProcessFailure

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

STALL_NOTICE = 30.0
"""Seconds without a new step after which a rank is named: longer than an interpreter lock is ever held (20 s)."""

NAMED = 4
"""Ranks that one sentence names at most."""

LOST_SLACK = 10.0
"""Seconds between the end of a process's connection and the report of its exit by its agent; both take a second."""


def on_tick(job: JobState) -> None:
    """Check all deadlines and do what is due."""
    if job.ending is None:
        _check_total(job)
    takeover.on_tick(job)
    if job.outage is not None:
        progress.append_states(job)
        return
    if job.pending_stop is not None and not (joining_workers.is_changing(job) and job.restart is None):
        ending.stop(job, job.pending_stop)
    for check in (_check_start, _check_idle, _check_tables, _check_connections, collective_losses.on_tick):
        if job.ending is None and job.restart is None:
            check(job)
    if job.training:
        own_loop = (_check_early_leave, stalls.name_late, _check_stalls)
        for check in (_check_early_leave, _check_idle) if job.follows_library else own_loop:
            if job.ending is None and job.restart is None:
                check(job)
        goes_on = job.ending is None and job.restart is None and not joining_workers.is_changing(job)
        if goes_on:
            scaling.grow(job)
        if goes_on and job.restart is None and job.checkpoints.is_due(job.now):
            checkpoints.propose_step(job, save=True, stop=False)
        if job.now - job.progress.appended_at >= job.order.report_seconds:
            job.progress.appended_at = job.now
            job.progress.append(job)
    progress.append_states(job)


def _timed_out(job: JobState, rank: Rank | None, text: str) -> None:
    hint = "raise the limit under timeouts: in the job file if more time is needed"
    if rank is not None:
        failure = job.failure_of(rank, f"TimedOut: {text}", code="timed-out", exit=5, hint=hint)
        failure = replace(failure, frames=job.stalls.frames(rank.member))
    else:
        host = next((index for index in range(len(job.order.hosts)) if index not in job.registered), 0)
        failure = ProcessFailure(
            member=f"agent/{host}", host=job.order.hosts[host].name, status=0, time=job.time, step=0,
            exception=f"TimedOut: {text}", frames=[], tail=[], code="timed-out", exit=5, hint=hint,
        )  # fmt: skip
    losses.fail(job, failure)


def _check_total(job: JobState) -> None:
    limit = job.order.total_timeout
    if limit is not None and job.now - job.began >= limit:
        _timed_out(job, job.ranks_of("worker")[0], f"the job has run for {limit:.0f} s, all that timeouts.total allows")


def _check_start(job: JobState) -> None:
    """Name the first rank that keeps the job from starting."""
    if job.training:
        return
    limit = job.order.start_timeout
    if job.state == "placing" and job.now - job.began >= limit:
        names = [host.name for index, host in enumerate(job.order.hosts) if index not in job.registered]
        _timed_out(job, None, f"psctl's agent on {', '.join(names)} did not register within {limit:.0f} s")
        return
    for stage, missing, text in _stages(job):
        gone = [rank for rank in missing if rank.ended]
        if stage == "prepared" and gone:
            losses.fail(job, job.failure_of(gone[0], "ended before it called prepare, which other workers have done"))
            return
        if stage in job.startup.reached and missing and job.now - job.startup.reached[stage] >= limit:
            late = ", ".join(job.describe(rank) for rank in missing)
            _timed_out(job, missing[0], f"{late} {text} within {limit:.0f} s")
            return


def _check_idle(job: JobState) -> None:
    """End a job when no worker prints or uses the processor any more, where steps need not come regularly.

    A script may report none, and a library evaluates between two steps for as long as it likes.
    """
    workers = job.live("worker")
    own_loop = "prepared" in job.startup.reached and not (job.training and job.follows_library)
    if own_loop or not workers:
        return
    limit = job.order.stall_timeout
    if not all(rank.pid and job.now - rank.active_at >= limit for rank in workers):
        job.stalls.cancel_gathering()
    elif job.stalls.gather_stacks(job, workers):
        names = ", ".join(job.describe(rank) for rank in workers[:NAMED])
        more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
        text = f"{names}{more} printed nothing and used no processor for {limit:.0f} s, which timeouts.stall allows"
        _timed_out(job, workers[0], text)


def _stages(job: JobState) -> list[tuple[str, list[Rank], str]]:
    workers, servers = job.ranks_of("worker"), job.ranks_of("server")
    decided, prepared = "decided" in job.startup.reached, "planning" in job.startup.reached
    return [
        ("starting", [rank for rank in workers if not rank.pid and not rank.ended], "did not start"),
        (
            "joined",
            [rank for rank in workers if not (rank.joined or rank.ended)],
            "did not call psctl.init as others did",
        ),
        (
            "prepared",
            [rank for rank in workers if rank.prepared is None]
            if "prepared" in job.startup.reached and not prepared
            else [],
            "did not call prepare as others did",
        ),
        ("planning", [rank for rank in servers if rank.address is None], "did not begin to listen"),
        ("decided", [rank for rank in workers if decided and not rank.ready], "did not get the start values"),
    ]


def _check_tables(job: JobState) -> None:
    """Name the first server that keeps a worker from opening a store."""
    late = table_placement.awaited_servers(job)
    if late and job.now - job.tables.since >= job.order.start_timeout:
        text = f"{job.describe(late[0])} did not begin to hold tables within {job.order.start_timeout:.0f} s"
        _timed_out(job, late[0], text)


def _check_connections(job: JobState) -> None:
    for rank in job.ranks.values():
        if rank.ended or rank.connected or rank.lost_at is None or rank.finished:
            continue
        if job.now - rank.lost_at >= LOST_SLACK:
            if rank.member.role == "reader":
                reading_groups.end(job, rank, "its connection to the coordinator is lost")
                continue
            if rank.joining:
                joining_workers.end(job, rank, "its connection to the coordinator is lost")
                continue
            text = f"ConnectionLost: {job.describe(rank)} runs, but its connection to the coordinator is lost"
            losses.fail(job, job.failure_of(rank, text, code="connection-failed"))
            return


def _check_early_leave(job: JobState) -> None:
    failure = ending.find_early_leaver(job)
    if failure is not None:
        losses.fail(job, failure)


def _check_stalls(job: JobState) -> None:
    """Name the ranks that stalled workers wait for, and end the job when it makes no step for too long."""
    stalled = [
        rank
        for rank in job.live("worker")
        if rank.connected
        and not rank.finished
        and job.now - rank.moved_at >= min(STALL_NOTICE, job.order.stall_timeout)
    ]
    if not stalled:
        job.stalls.cancel_gathering()
        return
    named = stalls.blocking_ranks(job, stalled)
    since = min(rank.moved_at for rank in stalled)
    new = [rank for rank in named if not job.has_noticed(("stall", (rank.member, rank.step)))]
    for rank in new:
        job.notice_once(("stall", (rank.member, rank.step)), _describe_stall(job, rank, since))
    if job.now - since < job.order.stall_timeout:
        job.stalls.cancel_gathering()
        job.stalls.ask_stacks(job, new)
    elif found := partitions.host_to_give_up(job, since):
        host, why = found
        job.partitions.given_up.add(host)
        for rank in job.ranks.values():
            rank.moved_at = job.now  # the others wait for replacements from now on
        losses.on_host_lost(job, host, why)
    elif job.stalls.gather_stacks(
        job, [*job.live("worker"), *(each for each in named if each.member.role == "server")]
    ):
        gone = [
            f"{each.member} ended at step {each.step}" for each in job.ranks_of("worker") if each.ended or each.finished
        ]
        unknown = [f"{each.member}: no stack, {why}" for each in named if (why := job.stalls.problem(each.member))]
        apart = partitions.describe_partitions(job, since)
        text = "; ".join([*apart, *(_describe_stall(job, rank, since) for rank in named), *gone, *unknown])
        _timed_out(job, named[0], f"{text}; timeouts.stall is {job.order.stall_timeout:.0f} s")


def _describe_stall(job: JobState, rank: Rank, since: float) -> str:
    """Return since when a rank keeps others waiting: a worker since its last step, a server since a worker waits."""
    last = stalls.last_activity(job, rank)
    if rank.member.role == "server":
        return f"{job.describe(rank)} keeps workers waiting since {job.now - since:.0f} s: {last}"
    return f"{job.describe(rank)} is at step {rank.step} since {job.now - rank.moved_at:.0f} s: {last}"
