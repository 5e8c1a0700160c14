"""Checkpoints of a job: the common step, the parts that members send, the commit, the copies on further hosts.

All senders must end their parts before a checkpoint is committed. Senders are all workers and, where the optimizer
steps on servers, the servers that are primary of a shard. Other servers may send a part too (of shards that they had
when the step was ordered, or an empty one); they are waited for once they have begun.

A common step is how all workers agree on one step: each sends the step in progress and does not start the step after
the next one before it receives the answer, which is one more than the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.policies import checkpoint_interval
from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointUploadEnded,
    CommitCheckpoint,
    DiscardCheckpoint,
    SendCheckpointCopy,
    UploadCheckpoint,
)
from psctl.coordinator.streams import shard_grants
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointSaved, CutAt, CutPosition, ProposeCut
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

REPORTS_WAIT = 10.0
"""Seconds that a checkpoint waits for the numbers that ranks report of its step. Ranks report a step when they come to
it: at the same time under bsp, at different times otherwise."""


class PendingCheckpoint(msgspec.Struct):
    """One checkpoint that is being made."""

    step: int
    begun: set[Member] = msgspec.field(default_factory=set)
    ended: set[Member] = msgspec.field(default_factory=set)
    tables: set[Member] | None = None
    """Servers that have not sent their tables; None: no request was sent yet."""
    complete_at: float | None = None
    """When the last part arrived; reports of its step may still be missing."""
    committing: bool = False


class PendingCopies(msgspec.Struct):
    """The copies of one checkpoint that are being made."""

    waiting: set[Member] = msgspec.field(default_factory=set)
    """Agents that have not answered."""
    holding: set[Member] = msgspec.field(default_factory=set)
    """Agents whose copies are verified."""
    failed: set[Member] = msgspec.field(default_factory=set)


class CommonStep(msgspec.Struct):
    """A common step that is being agreed on."""

    ticket: int
    save: bool
    stop: bool
    waiting: set[Member]
    """Workers that have not answered."""
    largest: int | None = None
    """The largest answer until now."""
    asked: set[Member] = msgspec.field(default_factory=set)
    """Workers that were asked; one that joined later gets the common step when it trains."""


class JobCheckpoints(msgspec.Struct):
    """All checkpoints of a job; the functions of this module change it."""

    job: str
    """The job's name."""
    resumed: str | None
    """Name of the checkpoint that the job resumes from."""
    every_seconds: float
    """Seconds between two checkpoints by time; 0: none."""
    due_at: float
    """When the next checkpoint by time is due."""
    senders: set[Member] = msgspec.field(default_factory=set)
    """Each must send a part."""
    first_steps: dict[Member, int] = msgspec.field(default_factory=dict)
    """The first step whose checkpoint has a part of a worker that joined while others trained."""
    last_steps: dict[Member, int] = msgspec.field(default_factory=dict)
    """The last step whose checkpoint has a part of a worker that leaves while others train."""
    open: dict[int, PendingCheckpoint] = msgspec.field(default_factory=dict)
    """By step: the checkpoints that are being made."""
    copied: dict[Member, int] = msgspec.field(default_factory=dict)
    """The step of the newest verified copy of each agent."""
    copying: dict[int, PendingCopies] = msgspec.field(default_factory=dict)
    """By step: the checkpoints whose copies are being made."""
    uploading: set[int] = msgspec.field(default_factory=set)
    """Steps whose checkpoints are being uploaded."""
    copy_hosts: int = -1
    """Hosts that could hold a copy when this was last compared with `copies`; -1: not yet."""
    dropped: set[int] = msgspec.field(default_factory=set)
    committed: set[int] = msgspec.field(default_factory=set)
    last_step: int | None = None
    """Step of the last verified checkpoint of this job."""
    problem: str = ""
    """Why the last checkpoint was given up; "" when it is written."""
    proposed: CommonStep | None = None
    last_cut: CutAt | None = None
    """The last common step."""
    tickets: int = 0
    cost: float = 0.0
    """Seconds for which the newest checkpoint stopped training; 0: not measured yet."""
    cost_step: int = -1
    """The step of that checkpoint."""

    def is_pending(self) -> bool:
        """Whether anything is being written, copied or uploaded."""
        return bool(self.open or self.copying or self.uploading)

    def senders_of(self, step: int) -> set[Member]:
        """Return the members that must send a part of the checkpoint of a step."""
        first, last = self.first_steps, self.last_steps
        return {one for one in self.senders if first.get(one, step) <= step <= last.get(one, step)}

    def is_due(self, now: float) -> bool:
        """Whether it is time for a checkpoint by `every_seconds`."""
        return self.every_seconds > 0 and now >= self.due_at and self.proposed is None and not self.open

    def newest_name(self) -> str | None:
        """Return the name of the newest verified checkpoint, that which the job resumed from included."""
        return f"{self.job}@{self.last_step}" if self.last_step is not None else self.resumed


# ---- the common step -----------------------------------------------------------------------------------------------


def propose_step(job: JobState, save: bool, stop: bool) -> bool:
    """Ask all workers that train for a common step; return False when none trains, or the script has the loop."""
    workers = {rank.member for rank in job.live("worker") if rank.connected and rank.joined and not rank.finished}
    hooked = any(rank.prepared is not None and rank.prepared.hooked for rank in job.live("worker"))
    if not workers or not job.training or (hooked and not job.follows_library):
        return False
    state = job.checkpoints
    state.tickets += 1
    state.due_at = job.now + state.every_seconds
    state.proposed = CommonStep(state.tickets, save, stop, set(workers), asked=workers)
    for member in sorted(workers):
        job.send(member, ProposeCut(state.tickets))
    return True


def on_position(job: JobState, rank: Rank, message: CutPosition) -> None:
    """Take a worker's step in progress."""
    rank.last_message_at = job.now
    proposed = job.checkpoints.proposed
    if proposed is not None and message.ticket == proposed.ticket:
        proposed.largest = message.step if proposed.largest is None else max(message.step, proposed.largest)
        _remove_waiting(job, proposed, rank.member)


def remove_worker(job: JobState, member: Member) -> None:
    """Wait no longer for a worker's step in progress."""
    proposed = job.checkpoints.proposed
    if proposed is not None and member in proposed.waiting:
        _remove_waiting(job, proposed, member)


def _remove_waiting(job: JobState, proposed: CommonStep, member: Member) -> None:
    """Announce the common step if no other worker's answer is missing."""
    proposed.waiting.discard(member)
    if proposed.waiting:
        return
    job.checkpoints.proposed = None
    if proposed.largest is None:
        return
    step = proposed.largest + 1
    if job.ending is not None and proposed.stop:
        job.ending.common_step = step
    cut = job.checkpoints.last_cut = CutAt(proposed.ticket, step, proposed.save, proposed.stop)
    for rank in job.live("worker"):
        if rank.connected and rank.joined and (rank.ready or rank.member in proposed.asked):
            job.send(rank.member, cut)


def send_last_cut(job: JobState, rank: Rank) -> None:
    """Send a worker that begins to train the last common step, which it may not have done yet."""
    if job.checkpoints.last_cut is not None:
        job.send(rank.member, job.checkpoints.last_cut)


# ---- parts, commit, copy -------------------------------------------------------------------------------------------


def on_part_begun(job: JobState, rank: Rank, step: int) -> None:
    """A member begins its part."""
    state, member = job.checkpoints, rank.member
    servers_send = any(sender.role == "server" for sender in state.senders)
    if member not in state.senders and not (servers_send and member.role == "server"):
        if not rank.ended:  # else it sent this before it was lost
            job.notice(f"{member} sent a part of a checkpoint that was not requested from it")
    elif step in state.dropped:  # a replacement was not there when the checkpoint was dropped
        if member.role == "worker":  # it may wait for the result; servers do not
            job.send(member, CheckpointSaved(step, "it was given up"))
    elif step not in state.committed:  # else it is an empty part of a checkpoint that is whole
        state.open.setdefault(step, PendingCheckpoint(step)).begun.add(member)
        state.due_at = job.now + state.every_seconds


def on_pause(job: JobState, rank: Rank, step: int, pause: float) -> None:
    """Take the seconds for which a worker's part stopped training, and adapt the interval of `every: auto`."""
    if not job.order.checkpoint.every_auto or rank.member.role != "worker" or not 0 < pause < math.inf:
        return
    state = job.checkpoints
    state.cost = max(state.cost, pause) if step == state.cost_step else pause
    state.cost_step = step
    hosts = len(job.order.hosts) - len(job.lost_hosts)
    mean = checkpoint_interval.mean_time_between_losses(hosts, job.now - job.began, job.losses.rolled_back)
    state.every_seconds = checkpoint_interval.interval(state.cost, mean)
    state.due_at = job.now + state.every_seconds


def on_part_ended(job: JobState, rank: Rank, step: int, *, of_tables: bool = False) -> None:
    """A member has sent its part; `commit_complete` follows."""
    save = job.checkpoints.open.get(step)
    if save is None or save.complete_at is not None:
        return
    if not of_tables:
        save.ended.add(rank.member)
    elif save.tables is not None:
        save.tables.discard(rank.member)
    if save.ended >= job.checkpoints.senders_of(step) | save.begun and not save.tables:
        save.complete_at = job.now


def commit_complete(job: JobState, *, at_once: bool = False) -> None:
    """Commit each checkpoint whose parts are all here as soon as every live rank has reported its step.

    A checkpoint's metrics are those of its own step over all ranks, or absent: metrics of another step, or of some
    ranks only, would make `keep_best` keep the wrong one.

    Args:
        job: the job.
        at_once: do not wait for reports.
    """
    reports = job.progress.reports
    for _, save in sorted(job.checkpoints.open.items()):
        if save.complete_at is None or save.committing:
            continue
        whole = not reports.at(save.step) or reports.settled(save.step, job.progress.reporting_ranks(job))
        if whole or at_once or job.now - save.complete_at >= REPORTS_WAIT:
            _commit(job, save, reports.at(save.step) if whole else {})


def _commit(job: JobState, save: PendingCheckpoint, metrics: dict[str, float], *, again: bool = False) -> None:
    assert job.plan is not None, "senders are known from the plan"
    save.committing = True
    layout, world = job.startup.layout, len(job.division.members_at(save.step - 1))
    held = (
        layout.parameters if layout is not None and not job.follows_library else ()
    )  # else the library has saved them
    job.instructions.append(
        CommitCheckpoint(
            step=save.step, epoch=job.progress.reports.epoch_of(save.step), world=world,
            servers=len(job.ranks_of("server")), strategy=job.plan.chosen, update=job.plan.update, metrics=metrics,
            parameters=[each.name for each in held], again=again, streams=shard_grants.state_at(job, save.step),
        )
    )  # fmt: skip


def on_committed(job: JobState, message: CheckpointCommitted) -> None:
    """A checkpoint is on disk, or could not be written."""
    state = job.checkpoints
    state.open.pop(message.step, None)
    _announce_saved(job, message.step, message.problem)
    if message.problem:
        state.dropped.add(message.step)
        state.problem = f"the checkpoint of step {message.step} was not written: {message.problem}"
        job.notice(state.problem)
        return
    state.last_step, state.problem = message.step, ""
    state.committed.add(message.step)
    job.append_event(
        events.CheckpointWritten(
            time=job.time,
            step=message.step,
            path=message.path,
            bytes=message.bytes,
            seconds=message.seconds,
            written=message.written,
        )
    )
    if job.order.checkpoint.to is not None:
        state.uploading.add(message.step)
        job.instructions.append(UploadCheckpoint(message.step))
    if job.order.checkpoint.copies:
        _report_missing_hosts(job)
        state.copying[message.step] = PendingCopies()
        _send_copies(job, message.step)


def on_uploaded(job: JobState, message: CheckpointUploadEnded) -> None:
    """A checkpoint is at `checkpoint.to`, or the target refused it; training goes on either way."""
    job.checkpoints.uploading.discard(message.step)
    if message.problem:
        is_there = "is uploaded" if message.place else "is not uploaded"
        job.notice(f"the checkpoint of step {message.step} {is_there}: {message.problem}")
    if message.place:
        job.append_event(events.CheckpointCopied(time=job.time, step=message.step, place=message.place))


def _copy_hosts(job: JobState) -> list[Member]:
    """Return the agents that can hold a copy, the standby's first: the first host that does not lead becomes it."""
    return [agent for agent in job.agents if agent.rank != job.head]


def _report_missing_hosts(job: JobState) -> None:
    """Append a notice when there are fewer hosts than copies: once, and again when their number changes.

    The default of one copy says nothing on a job of one host, which can have none.
    """
    state, wanted, hosts = job.checkpoints, job.order.checkpoint.copies, len(_copy_hosts(job))
    known, state.copy_hosts = state.copy_hosts, hosts
    if hosts != known and hosts < wanted and (wanted > 1 or len(job.order.hosts) > 1):
        job.notice(
            f"checkpoint.copies is {wanted}, and {hosts} further {'host' if hosts == 1 else 'hosts'} can hold one"
        )


def _send_copies(job: JobState, step: int) -> None:
    """Send a checkpoint to further hosts until it has as many copies as wanted, or no host is left to try."""
    copies = job.checkpoints.copying[step]
    used = copies.waiting | copies.holding | copies.failed
    missing = job.order.checkpoint.copies - len(copies.waiting | copies.holding)
    for agent in [each for each in _copy_hosts(job) if each not in used][:missing]:
        copies.waiting.add(agent)
        job.instructions.append(SendCheckpointCopy(step, agent, _newest_copy(job, agent)))
    if not copies.waiting:
        del job.checkpoints.copying[step]


def _newest_copy(job: JobState, agent: Member) -> int:
    """Return the step of an agent's copy that a later one may share files with, -1 for none: those of tables."""
    return job.checkpoints.copied.get(agent, -1) if job.tables.placement is not None else -1


def on_copied(job: JobState, agent: Member, step: int, problem: str, *, is_lost: bool = False) -> None:
    """An agent has verified its copy (problem ""), or it failed: another host gets it then, if there is one.

    A copy that was to share files with the agent's former one is first sent completely.
    """
    copies = job.checkpoints.copying.get(step)
    if copies is None or agent not in copies.waiting:
        return
    copies.waiting.discard(agent)
    host = job.order.hosts[agent.rank].name
    base = _newest_copy(job, agent)
    job.checkpoints.copied.pop(agent, None)
    if problem and base >= 0 and not is_lost:
        pass  # it is sent again, with all its files
    elif problem:
        copies.failed.add(agent)
        job.notice(f"the copy of the checkpoint of step {step} on {host} failed: {problem}")
    else:
        copies.holding.add(agent)
        job.checkpoints.copied[agent] = step
        job.append_event(events.CheckpointCopied(time=job.time, step=step, place=host))
    _send_copies(job, step)


def remove_copy_host(job: JobState, agent: Member) -> None:
    """A host is lost: its copies are not waited for."""
    for step in sorted(job.checkpoints.copying):
        on_copied(job, agent, step, "the host is lost", is_lost=True)
    job.checkpoints.copied.pop(agent, None)


# ---- checkpoints that are given up ---------------------------------------------------------------------------------


def remove_sender(job: JobState, member: Member) -> None:
    """Wait for nothing more of a lost member, and give up the checkpoints whose parts it has not sent."""
    remove_worker(job, member)
    state = job.checkpoints
    for step, save in list(state.open.items()):
        waited_for = ((state.senders_of(step) | save.begun) - save.ended) | (save.tables or set())
        if save.complete_at is None and member in waited_for:
            _drop(job, step, f"{member} ended before it was sent", "a sender was lost")


def drop_incomplete(job: JobState, why: str) -> None:
    """Give up the checkpoints whose parts are arriving: they would mix the states before and after a move of shards."""
    for step, save in list(job.checkpoints.open.items()):
        if save.complete_at is None:
            _drop(job, step, why, why)


def on_taken_over(job: JobState) -> None:
    """Give up what the lost coordinator was writing, unless it may be whole on disk: that is looked at."""
    state = job.checkpoints
    for step, save in sorted(state.open.items()):
        if save.committing:
            _commit(job, save, {}, again=True)
        else:
            _drop(job, step, "the coordinator was lost before it was written", "the coordinator was lost")
    job.instructions += [UploadCheckpoint(step) for step in sorted(state.uploading)]
    copying, state.copying = state.copying, {}
    for step, copies in sorted(copying.items()):
        hosts = ", ".join(job.order.hosts[agent.rank].name for agent in sorted(copies.waiting))
        job.notice(f"the copy of the checkpoint of step {step} on {hosts} failed: the coordinator was lost")


def drop_interrupted(job: JobState, rank: Rank, steps: Iterable[int]) -> None:
    """Give up the checkpoints of which a member sent parts on a connection that broke, unless its part has arrived."""
    state = job.checkpoints
    for step in steps:
        save = state.open.get(step)
        arrived = save is not None and (save.committing or rank.member in save.ended)
        if not arrived and step not in state.dropped | state.committed:
            _drop(job, step, f"the connection of {rank.member} broke while it was sent", "a connection broke")


def drop_steps(job: JobState, first: int, last: int, why: str) -> None:
    """Give up the checkpoints of these steps, also those that have not begun."""
    for step in range(first, last + 1):
        _drop(job, step, why, why)


def restart(job: JobState) -> None:
    """Give up what is incomplete, and forget dropped and committed steps: all processes will save them again."""
    state = job.checkpoints
    for step, save in list(state.open.items()):
        if save.complete_at is None:
            del state.open[step]
            job.instructions.append(DiscardCheckpoint(step))
    state.dropped.clear()
    state.committed.clear()
    state.first_steps.clear()
    state.last_steps.clear()
    state.proposed, state.last_cut, state.due_at = None, None, job.now + state.every_seconds


def _drop(job: JobState, step: int, why: str, problem: str) -> None:
    """Give up a checkpoint; append a notice if it had begun, and send `problem` to workers."""
    begun = job.checkpoints.open.pop(step, None) is not None
    job.checkpoints.dropped.add(step)
    job.instructions.append(DiscardCheckpoint(step))
    if begun:
        job.notice(f"the checkpoint of step {step} is given up: {why}")
    _announce_saved(job, step, problem)


def _announce_saved(job: JobState, step: int, problem: str) -> None:
    """Send workers, which may wait for it, the result of a checkpoint."""
    for rank in job.live("worker"):
        if rank.connected:
            job.send(rank.member, CheckpointSaved(step, problem))
