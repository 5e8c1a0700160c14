"""The collectives of the training script (run.all_reduce and others): workers connect for them at the first call.

    RanksWanted of any worker --> ListenForRanks to all workers, and a plan of collectives is made
    RankListens of all, and the plan is there --> RanksAt to all

All workers listen and connect whatever their scripts do, so the first collective of a group needs its members only.

A worker that replaces a lost one begins its script anew, and would call collectives that the others have passed. So
from the first call on every loss of a worker has all workers start again from the last checkpoint, under every
strategy, and workers neither join nor leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state.instructions import CollectivesPlanned, PlanCollectives
from psctl.job.training_messages import CollectiveChoice, ListenForRanks, RankListens, RanksAt, WorkerAt

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

CHANGED = "the job's workers have changed since it began, and a collective has a fixed number of ranks"


class ScriptCollectives(msgspec.Struct):
    """The workers that connect for the script's collectives."""

    wanted: bool = False
    connected: bool = False
    """Whether the addresses were sent."""
    choices: list[CollectiveChoice] | None = None
    listens: dict[int, RankListens] = msgspec.field(default_factory=dict)
    """By worker."""


def on_wanted(job: JobState, rank: Rank) -> None:
    """A worker's script calls its first collective."""
    if job.all_processes_end or job.collectives.wanted:
        return
    workers = job.ranks_of("worker")
    gone = next((each for each in workers if each.ended or each.finished), None)
    world = job.division.world
    changed = [each.member.rank for each in workers] != list(range(world)) or any(each.joining for each in workers)
    if gone is not None or changed:
        problem = CHANGED if gone is None else f"{job.describe(gone)} has reached the end of its script"
        job.send(rank.member, RanksAt([], problem=problem))
        return
    job.collectives.wanted = True
    job.instructions.append(PlanCollectives(job.order))
    for each in workers:
        if each.joined:
            _ask(job, each)


def on_joined(job: JobState, rank: Rank) -> None:
    """A worker has joined; others may wait for it already."""
    if job.collectives.wanted:
        _ask(job, rank)


def _ask(job: JobState, rank: Rank) -> None:
    job.send(rank.member, ListenForRanks([each.host for each in job.ranks_of("worker")]))


def on_planned(job: JobState, planned: CollectivesPlanned) -> None:
    """The plan of collectives is made."""
    if planned.world == job.division.world:  # else it was made before a restart with other workers
        job.collectives.choices = planned.choices
        _connect(job)


def on_listens(job: JobState, rank: Rank, message: RankListens) -> None:
    """A worker listens for all others."""
    job.collectives.listens[rank.member.rank] = message
    _connect(job)


def _connect(job: JobState) -> None:
    """Send all addresses to all workers when all listen."""
    state, workers = job.collectives, job.ranks_of("worker")
    ready = state.choices is not None and len(state.listens) == len(workers)
    if not ready or state.connected or job.all_processes_end:
        return
    state.connected = True
    for one in workers:
        at = []
        for each in workers:
            listens = state.listens[each.member.rank]
            secret = listens.secret if each.host == one.host else b""
            at.append(WorkerAt(each.member.rank, each.member.incarnation, listens.address, secret))
        job.send(one.member, RanksAt(at, state.choices or []))


def is_connecting(job: JobState) -> bool:
    """Whether workers wait for each other's addresses."""
    return job.collectives.wanted and not job.collectives.connected
