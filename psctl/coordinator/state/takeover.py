"""A job whose coordinator was killed continues: a new coordinator takes over the state, and members connect again.

While the coordinator is away the members train on: they need it for reports, checkpoints and changes of membership.
The new one knows all that its predecessor had decided (coordinator/journal.py), but not what happened meanwhile: which
processes and hosts were lost. Agents report each end in their sessions, and a process or a host that has not connected
again after RECONNECT is lost.

Bulk data that was in flight is gone: checkpoints whose parts were arriving are given up, and a start or a restart, in
which members load or wait for start values, begins again, as after any other loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints, losses, plan_check, script_collectives, table_placement
from psctl.coordinator.state.instructions import (
    CommitCheckpoint,
    FindRestorable,
    MakePlan,
    MakeShards,
    PlanAgain,
    PlanCollectives,
    SendCheckpointCopy,
    TakenOver,
    UploadCheckpoint,
)
from psctl.job.process_messages import ProcessFailure
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

REQUESTS = (
    MakePlan, PlanAgain, PlanCollectives, MakeShards, CommitCheckpoint, SendCheckpointCopy, UploadCheckpoint,
    FindRestorable,
)  # fmt: skip
"""Instructions whose answers were lost with the old coordinator; `on_taken_over` decides about each."""

RECONNECT = 10.0
"""Seconds in which members connect again."""


class Takeover(msgspec.Struct):
    """A takeover after which members are awaited: a rank counts as connected until it is given up."""

    since: float
    agents: set[int]
    """Hosts whose agents have not connected again."""
    ranks: set[Member]
    """Workers and servers that have not."""


def on_taken_over(job: JobState, taken: TakenOver, away: float) -> None:
    """Continue after the coordinator's process was replaced; for `away` seconds there was none."""
    former, job.head = job.head, taken.host
    job.append_coordinator_state("running", taken.pid)
    if former == job.head:
        job.notice(f"psctl's coordinator was lost; a new one continues the job after {away:.1f} s")
    else:
        name = job.order.hosts[former].name
        job.notice(
            f"{name}, where psctl's coordinator ran, is lost; {job.order.hosts[job.head].name} leads the job after "
            f"{away:.1f} s"
        )
    connected = {rank.member for rank in job.ranks.values() if rank.connected}
    job.takeover = Takeover(job.now, set(job.registered - job.lost_hosts), connected)
    for rank in job.ranks.values():
        rank.moved_at += away
        rank.active_at += away
        if rank.lost_at is not None:
            rank.lost_at += away
    checkpoints.on_taken_over(job)
    plan_check.on_taken_over(job)
    if job.ending is not None:
        job.ending.deadline += away
    elif job.restart is not None:
        job.restart.deadline += away
        if job.restart.phase == "choosing":
            job.instructions.append(FindRestorable())
    elif _is_starting(job):
        head = job.order.hosts[former].name
        text = "psctl's coordinator was killed while the job started"
        losses.fail(job, ProcessFailure("coordinator/0", head, -9, job.time, 0, text))
    if former != job.head:
        job.takeover.agents.discard(former)
        losses.on_host_lost(job, former, "it led the job, and no other host reached it")


def on_registered(job: JobState, host: int) -> None:
    """An agent has connected."""
    if job.takeover is not None:
        job.takeover.agents.discard(host)


def on_connected(job: JobState, member: Member) -> None:
    """A worker or a server has connected."""
    if job.takeover is not None:
        job.takeover.ranks.discard(member)


def on_exited(job: JobState, rank: Rank) -> None:
    """A process has ended; its connection may have ended with the old coordinator."""
    if job.takeover is not None and rank.member in job.takeover.ranks:
        job.takeover.ranks.discard(rank.member)
        rank.connected = False


def on_tick(job: JobState) -> None:
    """Hosts whose agents have not connected again in time are lost, and so are connections of ranks."""
    taken = job.takeover
    if taken is None or ((taken.agents or taken.ranks) and job.now - taken.since < RECONNECT):
        return
    job.takeover = None
    why = f"did not connect to the new coordinator within {RECONNECT:.0f} s"
    for host in sorted(taken.agents):
        losses.on_host_lost(job, host, f"its agent {why}")
    for member in sorted(taken.ranks):
        losses.on_connection_lost(job, member, f"it {why}")


def _is_starting(job: JobState) -> bool:
    """Whether a process may be loading values, or waiting for the plan or for start values."""
    live = [*job.live("worker"), *job.live("server")]
    loading = any(rank.joined and not (job.training and rank.ready) for rank in live)
    return loading or script_collectives.is_connecting(job) or bool(table_placement.awaited_servers(job))
