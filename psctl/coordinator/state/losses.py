"""Failures and losses: which of them the job survives on the spot, by a restart, or not at all.

A *loss* is the end of a process or of its host from outside: killed, crashed, out of reach. A failure of
the user's code (an exception, an exit status) would come again, so the job ends of it at once. Losses cause each
other, so the first report is not always the cause (failures.py): until it is known the restart is *settling*, and a
failure that is no loss, and follows from none, turns it into the job's end. A job survives `restart.max` losses.

Under ps some losses lose no state, and the job continues after them without a restart. The job survives a server's loss
when each of its shards has another member. It survives a worker's loss when the optimizer steps on servers, so that the
replacement finds all its state in the store, the script calls no collectives (script_collectives.py), and (`wait`) a
slot is free for it. While a replaced worker still waits for its start values, a server's loss restarts the job: the
last clock of the predecessor that counts may be complete on that server and applied nowhere, and no worker would push
it again. With the start values every shard, and every replica of it, has applied that clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import (
    checkpoints,
    collective_losses,
    ending,
    example_division,
    joining_workers,
    lost_workers,
    outages,
    progress,
    reading_groups,
    server_changes,
    table_placement,
)
from psctl.coordinator.state.instructions import CloseConnection
from psctl.job import failures, lifecycle
from psctl.job.process_messages import EndProcesses, ProcessExited, ProcessFailure
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank
    from psctl.orders import JobOrder

USED_UP = "restart.max in the job file limits the losses that a job survives"


class Losses(msgspec.Struct):
    """The losses that the job has survived."""

    survived: int = 0
    rolled_back: int = 0  # after how many the job went back to its last checkpoint
    last: ProcessFailure | None = None  # after which the job started again
    reason: str = ""  # of the restart in progress, for its event


class Restart(msgspec.Struct):
    """A restart of all processes; the phases are `lifecycle.RECOVERY`."""

    phase: str
    since: float
    deadline: float
    failures: list[ProcessFailure]
    counted: bool = False  # the first failure was counted as a loss before

    def move(self, trigger: str, deadline: float) -> None:
        """Go to the next phase."""
        self.phase = lifecycle.move(lifecycle.RECOVERY, self.phase, trigger)
        self.deadline = deadline


def fail(job: JobState, failure: ProcessFailure, *, counted: bool = False) -> None:
    """Restart or end the job after a failure.

    Args:
        job: the job.
        failure: what failed.
        counted: it is a loss that the job had survived on the spot, so it is counted already.
    """
    if job.restart is not None and job.restart.phase == "leaving":
        job.restart = None  # it restarts all the same, from the checkpoint before
    restart = job.restart
    if job.ending is not None:
        ending.fail(job, failure)
    elif restart is not None and (failures.is_death(failure) or failures.may_follow(failure, restart.failures)):
        restart.failures.append(failure)
    elif not failures.is_death(failure):
        end_with(job, [*(restart.failures if restart is not None else []), failure])
    elif counted:
        job.restart = Restart("settling", job.now, job.now, [failure], counted=True)
    elif job.losses.survived >= job.order.restarts:
        ending.fail(job, replace(failure, hint=failure.hint or _used_up(job)))
    else:
        job.restart = Restart("settling", job.now, job.now + failures.SETTLE_LOSS, [failure])


def restart_at_common_step(job: JobState, order: JobOrder, change: str) -> bool:
    """Have all workers go to a common step, save and leave; restart.py starts them from there with another order.

    Args:
        job: the job.
        order: of the job from then on.
        change: "3 workers", for the failure of a restart that cannot be made.

    Returns:
        False where no worker trains, or the script's own loop has no common step: then nothing changes.
    """
    if not checkpoints.propose_step(job, save=True, stop=True):
        return False
    job.scaling.new_order = order
    reason = job.failure_of(job.ranks_of("worker")[0], f"the job could not be started again with {change}")
    job.restart = Restart("leaving", job.now, job.now + job.order.stall_timeout, [reason])
    return True


def end_with(job: JobState, found: list[ProcessFailure]) -> None:
    """End the job of these failures instead of a restart."""
    since = job.now
    if job.restart is not None:
        job.restart.move("give up", job.now)
        since = job.restart.since
    ending.fail(job, *found, since=since)


def _used_up(job: JobState) -> str:
    if job.order.restarts == 0:
        return ""
    return f"the job has survived {job.losses.survived} losses, and no more: {USED_UP}"


# ---- what happens --------------------------------------------------------------------------------------------------


def on_exited(job: JobState, rank: Rank, message: ProcessExited) -> None:
    """A process has ended."""
    if rank.ended:
        return
    if rank.member.role == "reader":
        reading_groups.on_exited(job, rank, message)
        return
    if rank.joining:
        joining_workers.on_exited(job, rank, message)
        return
    if message.failure is not None and rank.joined:
        progress.record_step(job, rank, message.failure.step)
    failure = message.failure or job.failure_of(rank, f"ended with status {message.status}", status=message.status)
    failure = replace(failure, member=str(rank.member), host=job.host_name(rank))  # an agent reports its own host only
    early = rank.member.role == "server" and job.ending is None and not rank.leaving
    as_asked = rank.idle or (rank.leaving and rank.member.role == "server")
    trouble = early or (message.status != 0 and not as_asked)
    error = failure.exception if trouble else ""
    if job.restart is not None and job.restart.phase not in ("settling", "leaving"):
        job.move_rank(rank, "stopped")  # as ordered
    elif job.ending is None or job.ending.phase == "settling":
        job.move_rank(rank, "failed" if trouble else "ended", error)
        if rank.leaving and not trouble and rank.member.role == "worker":
            joining_workers.release_slot(job, rank)
        if trouble:
            _on_failed(job, rank, failure)
        elif job.ending is None and job.restart is None and not job.live("worker"):
            ending.begin(job, "done", "draining", ending.DRAIN)
    elif message.status == 0:
        job.move_rank(rank, "ended")
    else:
        job.move_rank(rank, "stopped" if job.ending.phase == "killing" else "failed", error)
        if job.ending.phase == "cutting":
            job.notice(f"{job.describe(rank)} failed while the job was stopped: {error}")
            ending.kill(job, job.grace, "a worker failed at the stop")
    (checkpoints.remove_worker if rank.connected else checkpoints.remove_sender)(job, rank.member)
    example_division.remove_worker(job, rank.member)


def _on_failed(job: JobState, rank: Rank, failure: ProcessFailure) -> None:
    """Survive on the spot or fail. A kill by signal is no consequence of another failure, so it need not settle."""
    if not failure.step:  # the process could not report it: under bsp no rank is more than one step from another
        known = max(rank.step, job.progress.reports.step) if rank.joined else 0
        failure = replace(failure, step=known)
    killed = failure.status < 0 or rank.member.role == "server"
    if not (killed and failures.is_death(failure) and survive(job, [rank], failure)):
        fail(job, failure)


def on_connection_lost(job: JobState, member: Member, reason: str) -> None:
    """A connection ended. With an agent's connection its host is lost; an agent reports the ends of other processes."""
    if member.role == "agent":
        if not outages.on_disconnected(job, member.rank):
            on_host_lost(job, member.rank, reason)
    elif member in job.ranks:
        rank = job.ranks[member]
        rank.connected, rank.lost_at = False, job.now
        checkpoints.remove_sender(job, member)


def on_protocol_broken(job: JobState, member: Member, reason: str) -> None:
    """A member sent a message that it may not send: treat it as lost and end its process."""
    if member in job.refused:
        return
    job.refused.add(member)
    rank = job.ranks.get(member)
    job.notice(f"{job.describe(rank) if rank is not None else member} is refused: {reason}")
    if rank is not None and not rank.ended:
        job.send(Member("agent", rank.host), EndProcesses([member], 0.0, reason))
    on_connection_lost(job, member, reason)


def on_host_lost(job: JobState, host: int, reason: str) -> None:
    """A host is out of reach, or its agent has ended: its ranks are lost.

    Connections to the coordinator outlast long silence, so those of the host are closed here: a restart waits for them.
    """
    job.returning.pop(host, None)
    if host not in job.registered or host in job.lost_hosts:
        return
    job.lost_hosts.add(host)
    checkpoints.remove_copy_host(job, Member("agent", host))
    name = job.order.hosts[host].name
    connected = [rank.member for rank in job.ranks.values() if rank.host == host and rank.connected]
    job.instructions += [CloseConnection(member, reason) for member in [Member("agent", host), *connected]]
    for member in [member for member in job.joining.members if job.ranks[member].host == host]:
        joining_workers.give_up(job, job.ranks[member], "lost", f"{name} is lost")
    every = [rank for rank in job.ranks.values() if rank.host == host and not rank.ended]
    ranks = [rank for rank in every if rank.member.role != "reader"]
    for rank in every:
        if rank.member.role == "reader":
            reading_groups.on_host_lost(job, rank, f"{name} is lost")
    for rank in ranks:
        job.move_rank(rank, "lost", f"{name} is lost")
        checkpoints.remove_sender(job, rank.member)
    if ranks:
        text = f"{failures.HOST_LOST}: {name} is lost, or psctl's agent there ended: {reason}"
        failure = job.failure_of(ranks[0], text)
        if not survive(job, ranks, failure):
            fail(job, failure)
    elif job.ending is None and not every:
        job.notice(f"{name} is lost ({reason}); nothing of the job was there")


# ---- losses that are survived on the spot --------------------------------------------------------------------------


def survive(job: JobState, lost: list[Rank], failure: ProcessFailure) -> bool:
    """Continue without these ranks if that loses nothing; else return False and change nothing."""
    if job.ending is not None or job.restart is not None or job.losses.survived >= job.order.restarts:
        return False
    servers = [rank for rank in lost if rank.member.role == "server"]
    workers = [rank for rank in lost if rank.member.role == "worker"]
    if collective_losses.may_replace(job):
        if not lost_workers.can_be_replaced(job, workers):
            return False
        if servers and not _remove_servers(job, [rank.member.rank for rank in servers]):
            return False
        job.losses.survived += 1
        if servers:
            _announce_lost_servers(job, servers, failure)
        if workers:
            collective_losses.on_lost(job, workers, failure)
        return True
    if not all(_may_lose_worker(job, rank) for rank in workers):
        return False
    if not lost_workers.can_be_replaced(job, [rank for rank in workers if lost_workers.is_replaced(job, rank)]):
        return False
    if servers and not all(_is_applied(job, rank) for rank in job.lost_workers.cuts):
        return False
    if servers and not _remove_servers(job, [rank.member.rank for rank in servers]):
        return False
    job.losses.survived += 1
    if servers:
        _announce_lost_servers(job, servers, failure)
    for rank in workers:
        lost_workers.on_lost(job, rank, failure.exception)
    return True


def _announce_lost_servers(job: JobState, servers: list[Rank], failure: ProcessFailure) -> None:
    server_changes.on_lost(job, servers, failure.exception)
    table_placement.announce(job)


def _is_applied(job: JobState, rank: int) -> bool:
    """Whether the last clock that counts of a lost worker is applied everywhere; else a server may have its only
    copy."""
    replacements = [each for each in job.live("worker") if each.member.rank == rank]
    if replacements:  # a ready one has pulled the version after that clock
        return all(each.ready for each in replacements)
    behind = 2 + (job.order.staleness or 0)  # a worker at step k has read all clocks before k - 1 - s
    return any(each.step >= job.lost_workers.cuts[rank] + behind for each in job.live("worker"))


def _remove_servers(job: JobState, ranks: list[int]) -> bool:
    """Remove servers from all chains, of parameters and of tables, if that loses nothing."""
    parameters, tables = job.shards.placement, job.tables.placement
    starting = not job.training and ("prepared" in job.startup.reached or tables is None)
    if starting or not table_placement.may_lose(job, ranks) or (parameters is None and tables is None):
        return False
    if parameters is not None and not parameters.remove_lost(ranks):
        return False
    return tables is None or tables.remove_lost(ranks)


def _may_lose_worker(job: JobState, rank: Rank) -> bool:
    if not job.training or job.shards.placement is None:
        return False
    on_servers = job.plan is not None and job.plan.update == "server" and job.shards.ranges
    if job.order.on_worker_loss == "restart" or not on_servers or not rank.decided or job.collectives.wanted:
        return False
    fewest = job.order.elastic[0] if job.order.elastic is not None else 1
    return lost_workers.is_replaced(job, rank) or len(job.live("worker")) >= fewest
