"""Groups that read the job's servers (`groups:`): their processes start with training, and no part of it needs them.

A reader is started when the workers train. It receives the decision of the job, then every change of the servers. When
it ends with an error, or is lost, it is started again, on another host if its own is lost, up to `restart.max` times;
the training goes on meanwhile, and afterwards without it. When the workers have ended, servers stay until readers have
ended as well, a minute at most (ending.py), so that a group can read the last values.

When all processes start again from a checkpoint, readers do, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import server_changes
from psctl.job import events
from psctl.job.environment import reader_environment
from psctl.job.process_messages import EndProcesses, ProcessExited
from psctl.job.reader_messages import GroupReport, TrainingEnded
from psctl.job.training_messages import Leave
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank


class ReadingGroups(msgspec.Struct):
    """The readers of the job."""

    started: bool = False
    """Whether the readers of this start of the job were ordered."""
    restarts: dict[int, int] = msgspec.field(default_factory=dict)
    """By reader, how often it was started again."""
    informed: set[Member] = msgspec.field(default_factory=set)
    """Readers that know that training has ended."""


def advance(job: JobState) -> None:
    """Start the readers once the workers train, and tell them when these have ended; called after every input."""
    reading = job.reading
    if not job.order.readers:
        return
    if job.training and not reading.started and not job.all_processes_end:
        reading.started = True
        for number in range(len(job.order.readers)):
            _start(job, number)
    if job.ending is not None and job.ending.phase == "draining":
        for rank in job.live("reader"):
            if rank.joined and rank.member not in reading.informed:
                reading.informed.add(rank.member)
                job.send(rank.member, TrainingEnded())


def _start(job: JobState, number: int) -> None:
    """Start a reader, on its own host or, where that is lost, on the one with the fewest processes."""
    host = job.order.readers[number].host
    hosts = {agent.rank: 0 for agent in job.agents}
    if host not in hosts:
        for rank in job.ranks.values():
            if rank.host in hosts and not rank.ended:
                hosts[rank.host] += 1
        host = min(hosts, key=lambda at: (hosts[at], at), default=host)
    job.remove_rank("reader", number)
    local_rank = sum(rank.host == host for rank in job.live("reader"))
    rank = job.add_rank("reader", number, host, local_rank)
    server_changes.start_rank(job, rank, reader_environment(job.order, number, job.order.hosts[host]))


def describe(job: JobState, rank: Rank) -> str:
    """Return a reader with its group and host as text: "reader/0 (evaluate) on node-b"."""
    group = job.order.readers[rank.member.rank].group
    return f"{rank.member} ({group}) on {job.host_name(rank)}"


def on_joined(job: JobState, rank: Rank) -> None:
    """A reader has connected: send it the decision."""
    draining = job.ending is not None and job.ending.phase == "draining"
    if job.startup.layout is None or (job.all_processes_end and not draining):
        job.send(rank.member, Leave("the job is ending" if job.ending is not None else "the job starts again"))
        return
    placement = job.shards.placement
    decided = server_changes.decision(job, job.resume, placement.assignment if placement is not None else None)
    rank.decided = True
    job.send(rank.member, decided)


def on_report(job: JobState, rank: Rank, message: GroupReport) -> None:
    """A reader reports numbers."""
    order = job.order.readers[rank.member.rank]
    rank.step = max(rank.step, message.step)
    job.append_event(
        events.GroupReported(
            time=job.time, group=order.group, rank=order.rank, step=message.step, metrics=message.metrics
        )
    )


def on_exited(job: JobState, rank: Rank, message: ProcessExited) -> None:
    """A reader's process has ended."""
    if rank.ended:
        return
    why = message.failure.exception if message.failure is not None else f"ended with status {message.status}"
    if message.status == 0:
        job.move_rank(rank, "ended")
    elif not job.all_processes_end:
        _on_failed(job, rank, "failed", why)
    elif job.ending is not None and job.ending.phase == "draining":
        job.move_rank(rank, "failed", why)
        job.notice(f"{describe(job, rank)} failed: {why}")
    else:
        job.move_rank(rank, "stopped")


def on_host_lost(job: JobState, rank: Rank, reason: str) -> None:
    """A reader is lost with its host."""
    if job.all_processes_end:
        job.move_rank(rank, "lost", reason)
    else:
        _on_failed(job, rank, "lost", reason)


def _on_failed(job: JobState, rank: Rank, trigger: str, reason: str) -> None:
    """Start a failed reader again, as often as `restart.max` allows; the training goes on in any case."""
    number, what = rank.member.rank, describe(job, rank)
    job.move_rank(rank, trigger, reason)
    count = job.reading.restarts.get(number, 0)
    if count >= job.order.restarts:
        times = f"after {count} new starts (restart.max)" if count else "(restart.max: 0)"
        job.notice(f"{what} {trigger}: {reason}; it is not started again {times}, and training continues")
        return
    job.reading.restarts[number] = count + 1
    job.notice(f"{what} {trigger}: {reason}; it is started again ({count + 1} of {job.order.restarts})")
    _start(job, number)


def end(job: JobState, rank: Rank, reason: str) -> None:
    """End a reader that has lost its connection; its exit follows."""
    rank.lost_at = None
    job.send(Member("agent", rank.host), EndProcesses([rank.member], 0.0, reason))
