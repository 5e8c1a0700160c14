"""Whom a clock waits for: named when it takes much longer than clocks usually do (clock_pace.py), and when it goes on.

Late are the workers at the least step that do not themselves wait for others. They are named once a step, with what
they were last heard to do and how long ago that was: a worker that computes long tells so every second; one whose
interpreter is held by a library, or that is stopped, is silent. Nothing is ended for being late: that is for
`timeouts.stall`.
"""

from __future__ import annotations

from psctl.coordinator.state.culprits import SILENT
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.activity import is_wait


def look(job: JobState) -> None:
    """Name those that a clock has waited for too long."""
    pace = job.pace
    workers = [rank for rank in job.live("worker") if not rank.finished]
    if pace is None or not workers or job.order.staleness is None:  # under asp nobody waits
        return
    least = min(rank.step for rank in workers)
    late, waited = pace.late, job.now - pace.since
    if pace.reached(job.now, least):
        for rank in workers:
            if rank.member.rank in late:
                job.say(f"{job.where(rank)} goes on: step {rank.step}, after {waited:.0f} s")
        return
    if not pace.is_late(job.now, job.order.report_seconds):
        return
    behind = [rank for rank in workers if rank.step == least]
    for rank in [each for each in behind if not is_wait(each.doing)] or behind:
        if rank.member.rank not in late:
            late.add(rank.member.rank)
            usual = f"{pace.usual or 0.0:.2g} s"
            since = f"since {waited:.0f} s (usual: {usual})"
            job.say(f"step {least + 1} waits for {job.where(rank)} {since}: {last(job, rank)}")


def last(job: JobState, rank: Rank) -> str:
    """Return what a rank was last heard to do, and since when it is silent."""
    if not rank.decided:
        return "it is being started again"
    doing = rank.doing or "nothing that it told"
    silent = job.now - rank.heard
    return f"{doing}, silent for {silent:.0f} s" if silent >= SILENT else doing
