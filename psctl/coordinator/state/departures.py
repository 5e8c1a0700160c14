"""Workers that leave in good order while others still train, so that the others can never go on.

Under bsp every clock needs every worker: one that alone breaks out of its loop, or calls sys.exit(0) or os._exit(0),
leaves the rest waiting for it. Those that wait, or that lose their connection to it, are not to blame.
"""

from __future__ import annotations

from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.process_messages import ProcessFailure

PATIENCE = 10.0
"""Seconds that all others wait in vain until one that left is named: servers never take that long for a last step."""

HINT = "let every rank make as many steps as the others: look for a break, sys.exit or os._exit that only one reaches"


def early(job: JobState, reach: int) -> Rank | None:
    """Return the first worker that left before it made `reach` steps, None when none did."""
    gone = [
        rank
        for rank in job.of("worker")
        if job.training and (rank.step < reach if rank.finished else rank.state == "done")
    ]
    return min(gone, key=lambda rank: rank.step, default=None)


def blamed(job: JobState, rank: Rank, others: str) -> ProcessFailure:
    """Return the failure of a worker that left early; `others` says what that does to the others."""
    how = f"left after step {rank.step}" if rank.finished else "ended with status 0 in the middle of training"
    return job.failure(rank, f"{job.where(rank)} {how}, while others go on: {others}", hint=HINT)


def waited_for_in_vain(job: JobState) -> ProcessFailure | None:
    """Return a failure when all workers that are left have long been waiting, and one that left is why."""
    left = [rank for rank in job.live("worker") if not rank.finished]
    stuck = all(rank.doing.startswith("sync") and job.now - rank.moved >= PATIENCE for rank in left)
    gone = early(job, max((rank.step for rank in job.of("worker")), default=0))
    if not left or not stuck or gone is None:
        return None
    first = left[0]
    return blamed(job, gone, f"{job.where(first)} is at step {first.step}, {first.doing}")
