"""While the job trains: steps, numbers, checkpoints."""

from __future__ import annotations

import math

from psctl.coordinator.state.checkpoint_progress import CommonStep, PendingCheckpoint
from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointCopySent,
    CommitCheckpoint,
    DiscardCheckpoint,
    SendCheckpointCopy,
)
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointCopyDone, CheckpointSaved, CutAt, CutPosition, ProposeCut
from psctl.job.process_messages import HostSample, OutputLines
from psctl.job.training_messages import Heartbeat, WorkerReport
from psctl.types import Member

STATES_EVERY = 5.0
"""Seconds between two state events of a rank that only tell its step."""

REPORTS_WAIT = 10.0
"""Seconds that a checkpoint waits for what ranks reported of its step. They send it when they come to that step: at the
same time where steps are joint, later where ranks may be apart."""

MEMORY_FULL = 0.95
"""Share of a host's memory above which people are told: the kernel ends processes soon after."""


def moved(job: JobState, rank: Rank, step: int) -> None:
    """A rank told its step."""
    rank.heard = job.now
    if step > rank.step:
        rank.step, rank.moved = step, job.now


def report(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """A worker's numbers."""
    moved(job, rank, message.step)
    rank.staleness = message.staleness
    job.reports.add(rank.member.rank, message)


def beat(job: JobState, rank: Rank, message: Heartbeat) -> None:
    """A process is alive."""
    moved(job, rank, message.step)
    rank.doing = message.doing


def finished(job: JobState, rank: Rank, step: int) -> None:
    """A worker's script reached its end."""
    moved(job, rank, step)
    rank.finished = True
    job.reports.finished(rank.member.rank, step)
    agreed(job, job.saves.without(rank.member))


def lines(job: JobState, host: str, message: OutputLines) -> None:
    """What a process printed goes to the log of everyone."""
    name = str(message.member)
    if message.member in job.ranks:
        job.ranks[message.member].active = job.now
    for text in message.lines:
        job.append(events.Log(time=job.time, rank=name, stream=message.stream, text=text))
    if message.dropped:
        text = f"... {message.dropped} lines left out here; see `psctl logs {job.order.name}`"
        job.append(events.Log(time=job.time, rank=name, stream=message.stream, text=text))
    if message.unwritten:
        job.say_once(
            ("logs", host),
            f"the disk of {host} is full: what {name} and others print there is not kept until there is room; training "
            "goes on. Free space there, or lower `logs: {max}` in the job file",
        )


def sample(job: JobState, agent: Member, message: HostSample) -> None:
    """How busy an agent's host is, and which of its processes are."""
    for member in message.busy:
        rank = job.ranks.get(member)
        if rank is not None and rank.host == agent.rank:
            rank.active = job.now
    if message.memory >= MEMORY_FULL:
        name = job.order.hosts[agent.rank].name
        job.say_once(("memory", name), f"{name}: {message.memory:.0%} of the memory is used")


# ---- progress ------------------------------------------------------------------------------------------------------


def progress(job: JobState) -> None:
    """Append a progress event if there is something new."""
    step = job.reports.complete(_reporting(job))
    every = job.reports.at(step) if step is not None else {}
    metrics = {name: value for name, value in every.items() if math.isfinite(value)}
    for name in every.keys() - metrics.keys():
        job.say_once(("not finite", name), f"{name} is {every[name]} at step {step}")
    told = (step if step is not None else job.reports.step, metrics)
    if told == job.progress_told:
        return
    job.progress_told = told
    rates = job.reports.rates(job.now)
    job.append(
        events.Progress(
            time=job.time, step=told[0], epoch=job.reports.epoch_of(told[0]), metrics=metrics,
            examples_per_second=rates.examples_per_second, bytes_per_second=rates.bytes_per_second,
            sync_seconds=rates.sync_seconds, compute_seconds=rates.compute_seconds,
            staleness=max((each.staleness for each in job.live("worker")), default=0),
            hidden_seconds=rates.hidden_seconds,
        )
    )  # fmt: skip


def _reporting(job: JobState) -> set[int]:
    """Return the ranks of the workers that may report further steps."""
    return {rank.member.rank for rank in job.live("worker") if rank.joined and not rank.finished}


def final_metrics(job: JobState) -> dict[str, float]:
    """Return each name's last complete value, finite ones only."""
    job.reports.complete(set())
    return {name: value for name, value in job.reports.last_values().items() if math.isfinite(value)}


def states(job: JobState) -> None:
    """Tell the steps of ranks that moved, every few seconds."""
    if job.now - job.states_at < STATES_EVERY:
        return
    job.states_at = job.now
    for rank in job.ranks.values():
        if rank.step != rank.told_step and not rank.ended:
            job.tell_state(rank)


# ---- cuts ----------------------------------------------------------------------------------------------------------


def propose(job: JobState, save: bool, stop: bool) -> bool:
    """Ask all workers that train for a common step; False when none does."""
    workers = {rank.member for rank in job.live("worker") if rank.connected and rank.joined and not rank.finished}
    if not workers or not job.training:
        return False
    cut = job.saves.propose(workers, save, stop, job.now)
    for member in sorted(workers):
        job.tell(member, ProposeCut(cut.ticket))
    return True


def position(job: JobState, rank: Rank, message: CutPosition) -> None:
    """A worker told where it is."""
    rank.heard = job.now
    agreed(job, job.saves.position(rank.member, message.ticket, message.step))


def agreed(job: JobState, cut: CommonStep | None) -> None:
    """All have answered: tell them where to cut."""
    if cut is None or cut.step is None:
        return
    if job.ending is not None and cut.stop:
        job.ending.cut = cut.step
    for rank in job.live("worker"):
        if rank.connected and rank.joined:
            job.tell(rank.member, CutAt(cut.ticket, cut.step, cut.save, cut.stop))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def save_begun(job: JobState, rank: Rank, step: int) -> None:
    """A sender begins its part."""
    problem = job.saves.begun(rank.member, step, job.now)
    if problem:
        job.say(problem)
    elif job.saves.dropped(step):  # a replacement, which was not there when it was given up
        job.tell(rank.member, CheckpointSaved(step, "it was given up"))


def save_ended(job: JobState, rank: Rank, step: int, *, of_tables: bool = False) -> None:
    """A sender has sent its part; commit when it was the last."""
    if job.saves.ended(rank.member, step, job.now, of_tables=of_tables):
        commit_sent(job)


def commit_sent(job: JobState, *, at_once: bool = False) -> None:
    """Commit the checkpoints whose parts have all come, each as soon as every live rank has reported its step.

    A checkpoint's metrics are those of its own step over all ranks, or absent: those of a step that not all ranks have
    reported in time, or of another step, would make `keep_best` keep the wrong one.

    Args:
        job: the job.
        at_once: wait for no report any more.
    """
    for save in job.saves.sent():
        whole = not job.reports.at(save.step) or job.reports.settled(save.step, _reporting(job))
        assert save.sent is not None, "these are the ones that were sent"
        if whole or at_once or job.now - save.sent >= REPORTS_WAIT:
            _commit(job, save, job.reports.at(save.step) if whole else {})


def _commit(job: JobState, save: PendingCheckpoint, metrics: dict[str, float]) -> None:
    assert job.plan is not None, "senders are known from the plan"
    save.committing = True
    job.out.append(
        CommitCheckpoint(
            step=save.step, epoch=job.reports.epoch_of(save.step), world=len(job.of("worker")),
            servers=len(job.of("server")), strategy=job.plan.chosen, update=job.plan.update, metrics=metrics,
            parameters=[each.name for each in job.layout.parameters] if job.layout is not None else [],
        )
    )  # fmt: skip


def give_up(job: JobState, gone: set[Member]) -> None:
    """Checkpoints that wait for somebody who is gone will never be whole."""
    for step in job.saves.give_up(gone):
        job.out.append(DiscardCheckpoint(step))
        names = ", ".join(str(member) for member in sorted(gone))
        job.say(f"the checkpoint of step {step} is given up: {names} ended before it was sent")
        saved(job, step, "a sender was lost")


def written(job: JobState, message: CheckpointCommitted) -> None:
    """A checkpoint is on disk, or was given up."""
    job.saves.written(message.step, message.problem)
    saved(job, message.step, message.problem)
    if message.problem:
        job.say(f"the checkpoint of step {message.step} was not written: {message.problem}")
        return
    job.append(
        events.CheckpointWritten(
            time=job.time, step=message.step, path=message.path, bytes=message.bytes, seconds=message.seconds
        )
    )
    others = [agent for agent in job.agents if agent.rank != 0]
    if job.order.checkpoint.copies >= 1 and others:
        job.saves.copying.add(message.step)
        job.out.append(SendCheckpointCopy(message.step, others[0]))


def copied(job: JobState, message: CheckpointCopySent | CheckpointCopyDone) -> None:
    """A second copy is on its way (nothing to do), proved, or failed."""
    if message.problem:
        job.say(f"the second copy of the checkpoint of step {message.step} failed: {message.problem}")
    if message.problem or isinstance(message, CheckpointCopyDone):
        job.saves.copying.discard(message.step)


def saved(job: JobState, step: int, problem: str) -> None:
    """Tell workers, which may wait for it, what became of a checkpoint."""
    for rank in job.live("worker"):
        if rank.connected:
            job.tell(rank.member, CheckpointSaved(step, problem))
