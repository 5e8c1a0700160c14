"""Lost workers under collectives: each is started again while the others wait for it, and keep their values.

The replacement takes its state from another worker (sync/recoverable_reducer.py has the reasons why that is exact). All
workers then connect anew: an epoch numbers their connections, ConnectAgain begins one, and when all workers of the job
listen in the newest epoch they get each other's addresses. A loss in the meantime begins the next epoch.

    connected --- a loss, or PlaneBroken and no loss within SETTLE ---> ConnectAgain(epoch + 1) to all
    WorkerListens(epoch) of all workers, replacements included      ---> WorkersAt(epoch): connected

Connections that broke without a loss (a link was cut) are made again in the same way, until they hold or a host is
given up (partitions.py). A worker that reports that no other has the state of the lost one has all processes start
again from the last checkpoint, and so has every loss that is not survived here: of a script whose batches are not of
psctl's loader, that reads a stream, opens stores itself or calls collectives, optimizers that step apart or in parts
(`update: sharded`), parameters on GPUs, or workers that have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints, example_division, losses, lost_workers, partitions, server_changes
from psctl.job import events
from psctl.job.layout_comparison import difference
from psctl.job.process_messages import ProcessFailure
from psctl.job.training_messages import ConnectAgain, NotReplaceable, PlaneBroken, Prepare, Resume, Welcome
from psctl.types import NO_SERVERS, Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

SETTLE = 1.5
"""Seconds after a broken connection in which the loss that caused it is reported."""

WITHOUT_PLANE = ("ps", "native", "alone")
"""Strategies that do not sum over psctl's data plane."""


class PlaneEpochs(msgspec.Struct):
    """The connections between the workers of a collective."""

    epoch: int = 0
    broken_at: float | None = None
    """When a worker reported that the connections of this epoch broke."""
    loss: ProcessFailure | None = None
    """The last loss whose replacement does not train yet."""


def is_collective(job: JobState) -> bool:
    """Whether workers sum over psctl's data plane."""
    return job.plan is not None and job.plan.chosen not in WITHOUT_PLANE


def may_replace(job: JobState) -> bool:
    """Whether lost workers can be replaced while those that are left keep their values."""
    if job.plan is not None and job.plan.update == "sharded":  # a lost worker's part of the optimizer's state is lost
        return False
    if not job.training or not is_collective(job) or job.order.period > 1 or job.order.on_worker_loss == "restart":
        return False
    if job.streams.passes:  # a worker that waits for a shard is in no sum, and gives no state
        return False
    if job.tables.of_script or job.collectives.wanted or any(rank.finished for rank in job.ranks_of("worker")):
        return False
    live = [rank for rank in job.live("worker") if rank.ready]
    fit = all(
        each.prepared is not None and not (each.prepared.outer or each.prepared.on_gpus or each.prepared.hooked)
        for each in live
    )
    return bool(live) and fit and all(rank.shares for rank in live)


def on_lost(job: JobState, lost: list[Rank], failure: ProcessFailure) -> None:
    """Workers are lost and the others keep their values: start replacements, and have all connect anew."""
    job.planes.loss = failure
    for rank in lost:
        job.append_loss(rank, failure.exception)
        job.checkpoints.senders.discard(rank.member)
        example_division.remove_worker(job, rank.member)
        checkpoints.drop_incomplete(job, f"{rank.member} is lost")
        host = lost_workers.host_for_replacement(job, rank)
        assert host is not None, "the job survives only when there is one"
        lost_workers.start_replacement(job, rank, host)
        job.notice(f"{rank.member} is started again, and takes its state from the others")
    _connect_again(job)


def _connect_again(job: JobState) -> None:
    planes = job.planes
    planes.epoch, planes.broken_at = planes.epoch + 1, None
    for rank in job.live("worker"):
        rank.listens = None
        if rank.decided:
            _send_epoch(job, rank)


def _send_epoch(job: JobState, rank: Rank) -> None:
    hosts = [each.host for each in job.ranks_of("worker")]
    job.send(rank.member, ConnectAgain(job.planes.epoch, hosts))


# ---- a replacement ---------------------------------------------------------------------------------------------------


def welcome_replacement(job: JobState, rank: Rank) -> None:
    """Welcome a replacement that has joined."""
    order, hosts = job.order, [each.host for each in job.ranks_of("worker")]
    every = order.checkpoint.every_steps
    resume = _resume(job)
    job.send(rank.member, Welcome(job.division.world, order.seed, every, order.report_seconds, resume, hosts))
    job.append_event(events.WorkerJoined(time=job.time, rank=rank.member.rank, host=job.host_name(rank)))


def _resume(job: JobState) -> Resume:
    """Return where a replacement continues, as far as known; another worker has the exact step."""
    return Resume("", job.progress.reports.step, {}, [])


def on_prepared(job: JobState, rank: Rank, message: Prepare) -> ProcessFailure | None:
    """A replacement has reached `prepare`: send it the decision; return a failure if its model differs."""
    assert job.startup.layout is not None
    text = difference(Prepare(job.startup.layout, job.startup.buffers), message)
    if text:
        return job.failure_of(rank, f"the model on {rank.member} differs from that of its previous start: {text}")
    rank.decided = True
    job.send(rank.member, server_changes.decision(job, _resume(job), NO_SERVERS))
    example_division.send_past_changes(job, rank)
    _send_epoch(job, rank)
    return None


def on_ready(job: JobState) -> None:
    """A replacement trains."""
    if not job.workers_being_replaced:
        job.planes.loss = None


# ---- broken connections ----------------------------------------------------------------------------------------------


def on_plane_broken(job: JobState, rank: Rank, message: PlaneBroken) -> None:
    """Connections of a worker to others broke: a loss is reported soon, or they are made again."""
    planes = job.planes
    if message.epoch < planes.epoch or job.all_processes_end or job.restart is not None:
        return
    if not may_replace(job):
        losses.fail(job, job.failure_of(rank, message.reason, code="peer-lost"))
        return
    for number in message.workers:
        incarnation = job.newest_incarnation("worker", number)
        other = job.ranks.get(Member("worker", number, incarnation or 0))
        if other is not None and other.ready:
            partitions.report(job, rank, other, message.reason)
    if planes.broken_at is None:
        planes.broken_at = job.now


def on_tick(job: JobState) -> None:
    """Have workers connect again whose connections broke without a loss."""
    planes = job.planes
    if planes.broken_at is not None and job.now - planes.broken_at >= SETTLE:
        _connect_again(job)


def on_not_replaceable(job: JobState, rank: Rank, message: NotReplaceable) -> None:
    """No worker has the state of a lost one: all go back to the last checkpoint."""
    if job.all_processes_end or job.restart is not None:
        return
    loss = job.planes.loss
    job.notice(f"a lost worker cannot be replaced while the others keep their values: {message.reason}")
    failure = loss or job.failure_of(rank, message.reason, code="peer-lost")
    losses.fail(job, failure, counted=loss is not None)
