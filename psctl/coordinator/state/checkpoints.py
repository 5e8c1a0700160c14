"""Checkpoints of a job: the common step, the parts that members send, the commit, the second copy.

All senders must end their parts before a checkpoint is committed. Senders are all workers and, where the optimizer
steps on servers, the servers that are primary of a shard. Other servers may send a part too (of shards that they had
when the step was ordered, or an empty one); they are waited for once they have begun.

A common step is how all workers agree on one step: each sends the step in progress and does not start the step after
the next one before it receives the answer, which is one more than the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointCopySent,
    CommitCheckpoint,
    DiscardCheckpoint,
    SendCheckpointCopy,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointCopyDone, CheckpointSaved, CutAt, CutPosition, ProposeCut
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

REPORTS_WAIT = 10.0
"""Seconds that a checkpoint waits for the numbers that ranks report of its step. Ranks report a step when they come to
it: at the same time under bsp, at different times otherwise."""


class PendingCheckpoint(msgspec.Struct):
    """One checkpoint that is being made."""

    step: int
    since: float
    begun: set[Member] = msgspec.field(default_factory=set)
    ended: set[Member] = msgspec.field(default_factory=set)
    tables: set[Member] | None = None
    """Servers that have not sent their tables; None: none was asked yet."""
    complete_at: float | None = None
    """When the last part arrived; reports of its step may still be missing."""
    committing: bool = False


class CommonStep(msgspec.Struct):
    """A common step that is being agreed on. `step` is None until all have answered."""

    ticket: int
    save: bool
    stop: bool
    waiting: set[Member]
    largest: int | None = None
    step: int | None = None


class JobCheckpoints:
    """All checkpoints of a job.

    Args:
        job: its name.
        every_seconds: between two checkpoints by time; 0: none.
        resumed: name of the checkpoint that the job goes on from.
        now: seconds.
    """

    def __init__(self, job: str, every_seconds: float, resumed: str | None, now: float) -> None:
        self.senders: set[Member] = set()  # each must send a part
        self.open: dict[int, PendingCheckpoint] = {}
        self.copying: set[int] = set()
        self.last_step: int | None = None  # of the last verified one of this job
        self.problem = ""  # of the last one that was given up
        self._proposed: CommonStep | None = None
        self._tickets = 0
        self._dropped: set[int] = set()
        self._committed: set[int] = set()
        self._job = job
        self._resumed = resumed
        self._every = every_seconds
        self._due = now + every_seconds

    def begin_part(self, member: Member, step: int, now: float) -> str:
        """Record that a member begins its part of a step's checkpoint; return why it may not, or ""."""
        servers_send = any(sender.role == "server" for sender in self.senders)
        if member not in self.senders and not (servers_send and member.role == "server"):
            return f"{member} sent a checkpoint's part unasked"
        if step in self._dropped or step in self._committed:
            return ""  # a late part of one that was given up, or an empty part of one that is whole
        self.open.setdefault(step, PendingCheckpoint(step, now)).begun.add(member)
        self._due = now + self._every
        return ""

    def add_tables(self, step: int, servers: set[Member]) -> bool:
        """Make these servers' tables a part of a checkpoint; return whether the servers must be asked for it now."""
        save = self.open.get(step)
        if save is None or save.tables is not None:
            return False
        save.tables = set(servers)
        return True

    def end_part(self, member: Member, step: int, now: float, *, of_tables: bool = False) -> bool:
        """Record that a member has sent its part; return whether it was the last."""
        save = self.open.get(step)
        if save is None or save.complete_at is not None:
            return False
        if not of_tables:
            save.ended.add(member)
        elif save.tables is not None:
            save.tables.discard(member)
        if save.ended >= self.senders | save.begun and not save.tables:
            save.complete_at = now
        return save.complete_at is not None

    def to_commit(self) -> list[PendingCheckpoint]:
        """Return those whose parts are all here and that are not being committed, oldest step first."""
        return [save for _, save in sorted(self.open.items()) if save.complete_at is not None and not save.committing]

    def record_commit(self, step: int, problem: str) -> None:
        """Record the result of a commit."""
        self.open.pop(step, None)
        if problem:
            self._dropped.add(step)
            self.problem = f"the checkpoint of step {step} was not written: {problem}"
        else:
            self.last_step, self.problem = step, ""
            self._committed.add(step)

    def drop_waiting_for(self, lost: set[Member]) -> list[int]:
        """Drop the checkpoints that wait for a lost member; return their steps."""
        return self._drop_all(
            save
            for save in self.open.values()
            if (((self.senders | save.begun) - save.ended) | (save.tables or set())) & lost
        )

    def drop_incomplete(self) -> list[int]:
        """Drop the checkpoints whose parts are not all here; return their steps."""
        return self._drop_all(self.open.values())

    def _drop_all(self, saves: Iterable[PendingCheckpoint]) -> list[int]:
        steps = [save.step for save in saves if save.complete_at is None]
        for step in steps:
            self.drop(step)
        return steps

    def restart(self, now: float) -> list[int]:
        """Drop what is incomplete and forget dropped and committed steps: they come again. Return the dropped steps."""
        given_up = self.drop_incomplete()
        self._dropped.clear()
        self._committed.clear()
        self._proposed, self._due = None, now + self._every
        return given_up

    def drop(self, step: int) -> bool:
        """Drop a step's checkpoint, also one that has not begun; return whether it had begun."""
        self._dropped.add(step)
        return self.open.pop(step, None) is not None

    def was_dropped(self, step: int) -> bool:
        """Whether this step's checkpoint was dropped."""
        return step in self._dropped

    def is_pending(self) -> bool:
        """Whether anything is being written or copied."""
        return bool(self.open or self.copying)

    def is_due(self, now: float) -> bool:
        """Whether it is time for a checkpoint by `every_seconds`."""
        return self._every > 0 and now >= self._due and self._proposed is None and not self.open

    def newest_name(self) -> str | None:
        """Return the name of the newest verified checkpoint, that which the job resumed from included."""
        return f"{self._job}@{self.last_step}" if self.last_step is not None else self._resumed

    # ---- common steps

    def propose(self, workers: set[Member], save: bool, stop: bool, now: float) -> int:
        """Begin to agree on a common step of these workers; return its ticket."""
        self._tickets += 1
        self._due = now + self._every
        self._proposed = CommonStep(self._tickets, save, stop, set(workers))
        return self._tickets

    def add_position(self, member: Member, ticket: int, step: int) -> CommonStep | None:
        """Record a worker's step in progress; return the common step if all have answered now."""
        proposed = self._proposed
        if proposed is None or ticket != proposed.ticket:
            return None
        proposed.largest = step if proposed.largest is None else max(proposed.largest, step)
        proposed.waiting.discard(member)
        return self._agreed(proposed)

    def remove_worker(self, member: Member) -> CommonStep | None:
        """Record that a worker will not answer; return the common step if all others have answered."""
        if self._proposed is None or member not in self._proposed.waiting:
            return None
        self._proposed.waiting.discard(member)
        return self._agreed(self._proposed)

    def _agreed(self, proposed: CommonStep) -> CommonStep | None:
        if proposed.waiting:
            return None
        self._proposed = None
        if proposed.largest is None:
            return None
        proposed.step = proposed.largest + 1
        return proposed


# ---- the common step -----------------------------------------------------------------------------------------------


def propose_step(job: JobState, save: bool, stop: bool) -> bool:
    """Ask all workers that train for a common step; return False when none trains."""
    workers = {rank.member for rank in job.live("worker") if rank.connected and rank.joined and not rank.finished}
    if not workers or not job.training:
        return False
    ticket = job.checkpoints.propose(workers, save, stop, job.now)
    for member in sorted(workers):
        job.send(member, ProposeCut(ticket))
    return True


def on_position(job: JobState, rank: Rank, message: CutPosition) -> None:
    """Take a worker's step in progress."""
    rank.last_message_at = job.now
    _announce_step(job, job.checkpoints.add_position(rank.member, message.ticket, message.step))


def remove_worker(job: JobState, member: Member) -> None:
    """Wait no longer for a worker's step in progress."""
    _announce_step(job, job.checkpoints.remove_worker(member))


def _announce_step(job: JobState, agreed: CommonStep | None) -> None:
    if agreed is None or agreed.step is None:
        return
    if job.ending is not None and agreed.stop:
        job.ending.common_step = agreed.step
    for rank in job.live("worker"):
        if rank.connected and rank.joined:
            job.send(rank.member, CutAt(agreed.ticket, agreed.step, agreed.save, agreed.stop))


# ---- parts, commit, copy -------------------------------------------------------------------------------------------


def on_part_begun(job: JobState, rank: Rank, step: int) -> None:
    """A member begins its part."""
    problem = job.checkpoints.begin_part(rank.member, step, job.now)
    if problem:
        job.notice(problem)
    elif job.checkpoints.was_dropped(step):  # a replacement was not there when the checkpoint was dropped
        job.send(rank.member, CheckpointSaved(step, "it was given up"))


def on_part_ended(job: JobState, rank: Rank, step: int, *, of_tables: bool = False) -> None:
    """A member has sent its part; commit when it was the last."""
    if job.checkpoints.end_part(rank.member, step, job.now, of_tables=of_tables):
        commit_complete(job)


def commit_complete(job: JobState, *, at_once: bool = False) -> None:
    """Commit each checkpoint whose parts are all here as soon as every live rank has reported its step.

    A checkpoint's metrics are those of its own step over all ranks, or absent: metrics of another step, or of some
    ranks only, would make `keep_best` keep the wrong one.

    Args:
        job: the job.
        at_once: do not wait for reports.
    """
    reports = job.progress.reports
    for save in job.checkpoints.to_commit():
        whole = not reports.at(save.step) or reports.settled(save.step, job.progress.reporting_ranks(job))
        assert save.complete_at is not None, "these are complete"
        if whole or at_once or job.now - save.complete_at >= REPORTS_WAIT:
            _commit(job, save, reports.at(save.step) if whole else {})


def _commit(job: JobState, save: PendingCheckpoint, metrics: dict[str, float]) -> None:
    assert job.plan is not None, "senders are known from the plan"
    save.committing = True
    layout = job.startup.layout
    job.instructions.append(
        CommitCheckpoint(
            step=save.step, epoch=job.progress.reports.epoch_of(save.step), world=len(job.ranks_of("worker")),
            servers=len(job.ranks_of("server")), strategy=job.plan.chosen, update=job.plan.update, metrics=metrics,
            parameters=[each.name for each in layout.parameters] if layout is not None else [],
        )
    )  # fmt: skip


def on_committed(job: JobState, message: CheckpointCommitted) -> None:
    """A checkpoint is on disk, or could not be written."""
    job.checkpoints.record_commit(message.step, message.problem)
    _announce_saved(job, message.step, message.problem)
    if message.problem:
        job.notice(f"the checkpoint of step {message.step} was not written: {message.problem}")
        return
    job.append_event(
        events.CheckpointWritten(
            time=job.time, step=message.step, path=message.path, bytes=message.bytes, seconds=message.seconds
        )
    )
    others = [agent for agent in job.agents if agent.rank != 0]
    if job.order.checkpoint.copies >= 1 and others:
        job.checkpoints.copying.add(message.step)
        job.instructions.append(SendCheckpointCopy(message.step, others[0]))


def on_copied(job: JobState, message: CheckpointCopySent | CheckpointCopyDone) -> None:
    """A second copy was sent (its agent has to verify it), was verified, or failed."""
    if message.problem:
        job.notice(f"the second copy of the checkpoint of step {message.step} failed: {message.problem}")
    if message.problem or isinstance(message, CheckpointCopyDone):
        job.checkpoints.copying.discard(message.step)


def drop_waiting_for(job: JobState, member: Member) -> None:
    """Give up the checkpoints that wait for a part of a lost member."""
    for step in job.checkpoints.drop_waiting_for({member}):
        job.instructions.append(DiscardCheckpoint(step))
        job.notice(f"the checkpoint of step {step} is given up: {member} ended before it was sent")
        _announce_saved(job, step, "a sender was lost")


def drop_incomplete(job: JobState, why: str) -> None:
    """Give up the checkpoints whose parts are arriving: they would mix the states before and after a move of shards."""
    for step in job.checkpoints.drop_incomplete():
        job.instructions.append(DiscardCheckpoint(step))
        job.notice(f"the checkpoint of step {step} is given up: {why}")
        _announce_saved(job, step, why)


def drop_steps(job: JobState, first: int, last: int, why: str) -> None:
    """Give up the checkpoints of these steps, also those that have not begun."""
    for step in range(first, last + 1):
        job.instructions.append(DiscardCheckpoint(step))
        if job.checkpoints.drop(step):
            job.notice(f"the checkpoint of step {step} is given up: {why}")
        _announce_saved(job, step, why)


def _announce_saved(job: JobState, step: int, problem: str) -> None:
    """Send workers, which may wait for it, the result of a checkpoint."""
    for rank in job.live("worker"):
        if rank.connected:
            job.send(rank.member, CheckpointSaved(step, problem))
