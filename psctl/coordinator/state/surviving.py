"""Which losses the job goes on from at once, without going back to a checkpoint: those of ps that lose nothing.

A server's death is survived when each of its shards has another member; a worker's when the optimizer steps on
servers, so that the store has all that its replacement needs, and (`wait`) there is a slot for it. All else restarts
the job; so does a server's death while a replaced worker still waits for its start values: the last clock that counts
of the one before may be whole on that server and applied nowhere, and nobody would push it again. With the start values
every shard, and every replica of it, has applied that clock.
"""

from __future__ import annotations

from psctl.coordinator.state import death_cut, server_changes, table_placement
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.process_messages import ProcessFailure


def goes_on(job: JobState, dead: list[Rank], failure: ProcessFailure) -> bool:
    """Take these deaths in and go on, if that is possible; False, and nothing is changed, when it is not."""
    if job.ending is not None or job.recovery is not None or job.losses >= job.order.restarts:
        return False
    servers = [rank for rank in dead if rank.member.role == "server"]
    workers = [rank for rank in dead if rank.member.role == "worker"]
    if not all(_may_lose(job, rank) for rank in workers):
        return False
    if servers and any(not _applied(job, rank) for rank in job.cuts):
        return False
    if servers and not _may_lose_servers(job, [rank.member.rank for rank in servers]):
        return False
    job.losses += 1
    if servers:
        server_changes.lost(job, servers, failure.exception)
        table_placement.tell(job)
    for rank in workers:
        death_cut.lost(job, rank, failure.exception)
    return True


def _applied(job: JobState, rank: int) -> bool:
    """Is the last clock that counts of a dead worker applied everywhere, so that no server has a push's only copy?"""
    later = [each for each in job.live("worker") if each.member.rank == rank]
    if later:  # it pulled the clock after that
        return all(each.ready for each in later)
    behind = 2 + (job.order.staleness or 0)  # who is at step k has read all clocks before k - 1 - s
    return any(each.step >= job.cuts[rank] + behind for each in job.live("worker"))


def _may_lose_servers(job: JobState, ranks: list[int]) -> bool:
    """Strike servers out of all chains, of parameters and of tables, if that loses nothing."""
    starting = not job.training and ("prepared" in job.first or job.tables.holdings is None)
    if starting or not table_placement.may_lose(job, ranks) or (job.holdings is None and job.tables.holdings is None):
        return False
    if job.holdings is not None and not job.holdings.lost(ranks):
        return False
    return job.tables.holdings is None or job.tables.holdings.lost(ranks)


def _may_lose(job: JobState, rank: Rank) -> bool:
    if not job.training or job.holdings is None:
        return False
    served = job.plan is not None and job.plan.update == "server" and job.shards
    if job.order.on_worker_loss == "restart" or not served or not rank.decided:
        return False
    if death_cut.replaced(job, rank):
        return death_cut.place_for(job, rank) is not None
    return len(job.live("worker")) > 0
