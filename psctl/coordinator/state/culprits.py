"""Which ranks keep a job from going on, by what each rank was last heard to do."""

from __future__ import annotations

from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.activity import is_wait, waited_for

SILENT = 3.0
"""Seconds without a message after which a rank is called silent: heartbeats come once a second."""


def culprits(job: JobState, still: list[Rank]) -> list[Rank]:
    """Return whom the ranks that stand still wait for, in the end.

    The waits are followed from rank to rank. Named are those at the end that wait for nobody: workers first, of these
    the ones with the fewest steps. When all workers wait, those that are silent are named, for what they
    last said may be no longer true; else the servers at the end; else the workers with the fewest steps. Of several
    that are equal all are named.

    Args:
        still: workers whose step has not moved for too long; not empty.
    """
    workers = [rank for rank in job.live("worker") if not rank.finished]
    waiting = {rank.member for rank in workers if is_wait(rank.doing)}
    if not any(rank.member in waiting for rank in still):
        return _least(still)
    ends = _ends(job, workers, [rank for rank in still if rank.member in waiting])
    busy = _least([rank for rank in ends if rank.member.role == "worker"])
    if not busy:
        least = min(rank.step for rank in workers)
        busy = [rank for rank in workers if rank.step == least and rank.member not in waiting]
    return busy or [rank for rank in workers if _silent(job, rank)] or ends or _least(workers)


def _ends(job: JobState, workers: list[Rank], first: list[Rank]) -> list[Rank]:
    """Follow the waits; return the ranks that are reached and wait for nobody."""
    live = {(rank.member.role, rank.member.rank): rank for rank in (*job.live("server"), *workers)}
    seen, open_ = {rank.member for rank in first}, list(first)
    found = []
    while open_:
        rank = open_.pop()
        if rank.member.role == "server" or not is_wait(rank.doing):
            found.append(rank)
            continue
        names = waited_for(rank.doing)
        after = [live[name] for name in names if name in live] if names else [w for w in workers if w.step <= rank.step]
        for each in after:
            if each.member not in seen:
                seen.add(each.member)
                open_.append(each)
    return sorted(found, key=lambda rank: rank.member)


def _least(ranks: list[Rank]) -> list[Rank]:
    least = min((rank.step for rank in ranks), default=0)
    return [rank for rank in ranks if rank.step == least]


def _silent(job: JobState, rank: Rank) -> bool:
    return job.now - rank.heard >= SILENT
