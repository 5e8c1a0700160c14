"""Workers that join and leave while the others train (`psctl scale --workers`, free slots of an elastic job).

A new worker's process starts, builds its model and calls `prepare` while the others train: nothing waits for it, and it
takes part in no clock. When all new ones have prepared, the members agree on the first clock that none has begun
(example_division.py). From there on the new workers share its examples and start from the servers' values of that
clock, with worker/0's state of it; those that are to leave end before it. No other process starts again, and no step
is done twice. A new worker that fails before it takes part is given up, and the others never notice.

This needs servers that step, batches of psctl's loader, which can be divided anew, and clocks that all workers share
(bsp, ssp); otherwise all processes go to a common step and start again (scaling.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import example_division, server_changes
from psctl.job import events
from psctl.job.environment import worker_environment
from psctl.job.layout_comparison import difference
from psctl.job.process_messages import EndProcesses, HoldSlots, ProcessExited
from psctl.job.training_messages import Prepare, Resume, Welcome
from psctl.orders import HostOrder
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

TOGETHER = 5.0
"""Seconds for which workers that have prepared wait for others that join."""

RETRY = 60.0
"""Seconds after a failed start before an elastic job starts another worker by itself; twice as long each time."""


class JoiningWorkers(msgspec.Struct):
    """The workers that were started while others train, and take no part yet."""

    members: list[Member] = msgspec.field(default_factory=list)
    since: float = 0.0  # when the last ones were started
    prepared_at: float | None = None  # when the first of them had prepared
    failures: int = 0
    failed_at: float = 0.0


def may_change(job: JobState) -> bool:
    """Whether workers can join and leave while the others train."""
    plan = job.plan
    on_servers = plan is not None and plan.chosen == "ps" and plan.update == "server" and bool(job.shards.ranges)
    divisible = job.order.staleness is not None and any(rank.shares for rank in job.live("worker"))
    return job.training and on_servers and divisible and not _has_tables(job)


def may_retry(job: JobState) -> bool:
    """Whether an elastic job may start workers by itself again, after those that failed."""
    state = job.joining
    return not state.failures or job.now - state.failed_at >= RETRY * 2 ** min(state.failures - 1, 4)


def start(job: JobState, count: int) -> None:
    """Start so many new workers on free slots, in the roster's order, under the lowest free numbers."""
    state = job.joining
    job.order = replace(job.order, hosts=hosts_as_they_run(job))
    state.since, state.prepared_at = job.now, None
    taken = {rank.member.rank for rank in job.live("worker")}
    free = iter(number for number in range(len(taken) + count) if number not in taken)
    for agent in job.agents:
        order = job.order.hosts[agent.rank]
        used = {rank.local_rank for rank in job.live("worker") if rank.host == agent.rank}
        while len(state.members) < count and len(used) < max(order.slots, order.workers):
            number, local = next(free), next(local for local in range(len(used) + 1) if local not in used)
            used.add(local)
            job.remove_rank("worker", number)
            rank = job.add_rank("worker", number, agent.rank, local)
            job.set_joining(rank, joining=True)
            state.members.append(rank.member)
        job.send(agent, HoldSlots(len(used)))
    seats, restarts = job.seats(), job.losses.survived + job.scaling.restarts
    for member in state.members:
        environment = worker_environment(job.order, seats, member.rank, restarts)
        server_changes.start_rank(job, job.ranks[member], environment)


def leave(job: JobState, workers: int) -> None:
    """Have the workers with the highest numbers leave at the next clock that none has begun, until `workers` remain."""
    job.order = replace(job.order, hosts=hosts_as_they_run(job))
    live = [rank.member.rank for rank in job.live("worker") if not rank.leaving]
    example_division.begin_change(job, leaving=live[workers:])


def on_joined(job: JobState, rank: Rank) -> None:
    """A new worker has connected."""
    order = job.order
    every = order.checkpoint.every_steps
    job.send(rank.member, Welcome(job.division.world, order.seed, every, order.report_seconds))


def on_prepared(job: JobState, rank: Rank, message: Prepare) -> None:
    """A new worker has reached `prepare`: it joins, or ends if its model differs."""
    assert job.startup.layout is not None, "the others train"
    text = difference(Prepare(job.startup.layout, job.startup.buffers), message)
    if text:
        end(job, rank, f"its model differs from that of the others: {text}")
    elif job.joining.prepared_at is None:
        job.joining.prepared_at = job.now


def on_exited(job: JobState, rank: Rank, message: ProcessExited) -> None:
    """A new worker's process has ended before it took part."""
    why = message.failure.exception if message.failure is not None else f"it ended with status {message.status}"
    give_up(job, rank, "stopped" if rank.leaving else "failed", why)


def give_up(job: JobState, rank: Rank, trigger: str, why: str) -> None:
    """Go on without a new worker, whose process has ended."""
    state = job.joining
    if not rank.leaving:
        _note_failure(job)
        job.notice(f"{job.describe(rank)}, which was to join, is given up: {why}")
    job.move_rank(rank, trigger, "" if rank.leaving else why)
    state.members.remove(rank.member)
    job.remove_rank("worker", rank.member.rank)
    release_slot(job, rank)
    example_division.remove_joining(job, rank.member)


def end(job: JobState, rank: Rank, why: str) -> None:
    """Have a new worker's process ended, which then counts as given up."""
    if not rank.leaving:
        rank.leaving = True
        _note_failure(job)
        job.notice(f"{job.describe(rank)}, which was to join, is ended: {why}")
        job.send(Member("agent", rank.host), EndProcesses([rank.member], job.grace, why))
        example_division.remove_joining(job, rank.member)


def _note_failure(job: JobState) -> None:
    job.joining.failures, job.joining.failed_at = job.joining.failures + 1, job.now


def release_slot(job: JobState, rank: Rank) -> None:
    """Let other jobs use the slot of a worker that has left."""
    if rank.host not in job.lost_hosts:
        others = sum(each.host == rank.host for each in job.live("worker"))
        job.send(Member("agent", rank.host), HoldSlots(others))


def advance(job: JobState) -> None:
    """Begin a change when all new workers have prepared, carry out one that is decided, and end those that cannot join
    any more."""
    state, decided = job.joining, job.division.decided
    if decided is not None:
        job.division.decided = None
        _take_in(job, decided.joining, decided.clock)
        _let_go(job, decided.leaving, decided.clock)
    _end_late(job)
    if not state.members:
        return
    ranks = [job.ranks[member] for member in state.members]
    why = _why_not(job)
    for rank in ranks:
        late = rank.prepared is None and job.now - state.since >= job.order.start_timeout
        if why or late:
            end(job, rank, why or f"it has not prepared within {job.order.start_timeout:.0f} s")
    ready = [rank for rank in ranks if rank.prepared is not None and not rank.leaving]
    waits = any(rank.prepared is None and not rank.leaving for rank in ranks)
    patient = state.prepared_at is not None and job.now - state.prepared_at < TOGETHER
    if ready and not (waits and patient) and not is_changing(job):
        example_division.begin_change(job, joining=[rank.member for rank in ready])


def _end_late(job: JobState) -> None:
    """End workers that joined when worker/0 had made all steps: its state, with which they start, may never arrive."""
    if not job.checkpoints.first_steps:
        return
    zero = next((rank for rank in job.ranks_of("worker") if rank.member.rank == 0 and not rank.ended), None)
    if zero is None or not zero.finished:
        return
    for member in job.checkpoints.first_steps:
        rank = job.ranks.get(member)
        if rank is not None and not rank.ended and not rank.leaving and not rank.ready and rank.step >= zero.step:
            end_idle(job, rank, "the others have made all steps")


def end_idle(job: JobState, rank: Rank, why: str) -> None:
    """Have a worker's process ended that has nothing to do; however it ends, that is no loss."""
    rank.leaving = rank.idle = True
    job.send(Member("agent", rank.host), EndProcesses([rank.member], job.grace, why))


def _why_not(job: JobState) -> str:
    """Return why nobody can join any more, or ""."""
    if job.ending is not None or job.pending_stop is not None:
        return "the job is ending"
    if job.restart is not None:
        return "all processes start again"
    if any(rank.finished and not rank.leaving for rank in job.live("worker")):
        return "the others have finished"
    if job.collectives.wanted:
        return "its workers call collectives"
    return "its script opened a store" if _has_tables(job) else ""


def _has_tables(job: JobState) -> bool:
    return bool(job.tables.asked or job.tables.first)


def is_changing(job: JobState) -> bool:
    """Whether a change of the members is in progress, or a lost worker's replacement does not train yet."""
    return bool(job.division.change is not None or job.workers_being_replaced or job.lost_workers.pending)


def _take_in(job: JobState, members: list[Member], clock: int) -> None:
    """Send new workers, which are members from `clock` on, the decision."""
    assert job.shards.placement is not None, "the others train"
    for member in members:
        rank = job.ranks[member]
        job.joining.members.remove(member)
        job.set_joining(rank, joining=False)
        rank.decided, rank.step, rank.moved_at = True, clock, job.now
        job.checkpoints.senders.add(member)
        job.checkpoints.first_steps[member] = clock + 1
        resume = Resume("", clock, {}, [])
        job.send(member, server_changes.decision(job, resume, job.shards.placement.assignment))
        example_division.send_past_changes(job, rank)
        job.append_event(events.WorkerJoined(time=job.time, rank=member.rank, host=job.host_name(rank)))
        _count(job, rank.host, 1)
        job.joining.failures = 0


def _let_go(job: JobState, numbers: list[int], clock: int) -> None:
    """These workers make no clock from `clock` on, and end."""
    for rank in job.live("worker"):
        if rank.member.rank in numbers:
            rank.leaving = True
            job.checkpoints.last_steps[rank.member] = clock
    for number in numbers:
        found = [rank.host for rank in job.ranks_of("worker") if rank.member.rank == number]
        _count(job, found[-1], -1)


def _count(job: JobState, host: int, more: int) -> None:
    """Change the workers of a host that all processes start again with after a loss."""
    hosts = list(job.order.hosts)
    hosts[host] = replace(hosts[host], workers=max(0, hosts[host].workers + more))
    job.order = replace(job.order, hosts=hosts)


def hosts_as_they_run(job: JobState) -> list[HostOrder]:
    """Return the hosts with the workers that run there and stay."""
    on_host = Counter(rank.host for rank in job.live("worker") if not rank.leaving)
    return [replace(host, workers=on_host[index]) for index, host in enumerate(job.order.hosts)]
