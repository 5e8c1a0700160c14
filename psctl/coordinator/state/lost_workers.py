"""Lost workers under ps: the last clock of a lost worker that counts, the same on every shard, and its replacement.

The problem. A worker pushes its gradient of clock c to every shard; when it is lost, some have it and some have not.
Were each shard to apply what it has, the parameters of one clock would hold the lost worker's examples in part, and no
worker could do the rest again without doing something twice.

The cut. Servers receive `WorkerGone`: from then on they refuse that incarnation, so what a server holds of it is
final, and it answers with that (`LostWorkerClocks`: shard -> last whole clock). The least of all answers, c*, is the
last clock that every shard has whole: it counts everywhere (`CountUntil`), and what a shard has beyond it is dropped
everywhere. So each clock of the lost worker is applied on all shards or on none.

Why dropping is possible: no shard has applied a clock beyond c*. A rank sends its `Step` of clock c to a server only
when every push of that clock to other servers is there, and a shard applies clock c only with every rank's Step of it;
so if any shard applied c, all shards have the lost worker's push of c, and c <= c*. A version beyond c*+1 would
contradict this; it can come only of a server and a worker lost at once, or of a worker lost in backward where shards
step then (StepInBackward), and then the whole job goes back to its last checkpoint.

Shards must not move while servers report their clocks: a cut begins when no transfer is awaited, no transfer begins
before the cut is made, and after a server's loss the servers of the new assignment report again.

A host sum (one push for several workers of a host) that holds the lost worker's push can't be taken apart: where it is
cut the whole sum is dropped, and the others push theirs again, so it counts for no lost worker: of a second lost one,
whose cut was made before, the push would be lost. But where some shard has all ranks' Steps of the clock, or has
applied it, every push of it is everywhere, no worker will be cut before it, and the host sums count.

Of two workers that are lost at once the earlier cut is valid for both: dropping the push of one drops what a shard has
summed of that clock, and a lost worker can't push it again. Cuts are made when the servers have answered for all.

A clock is applied with one worker's numbers (learning rates ...). Where no other worker runs that sent them for
all that counts and is not applied, or will (all were lost at about the same time), the last clock that counts is the
last that was applied.

After the cut:
    wait        the next incarnation is started at once, and welcomed when c* is known: it pulls version c*+1 and does
                its next clocks again, with the same examples and random numbers: the result is equal to the bit
    continue    from clock c*+1 on only the others are members (`Members`); its examples are divided among them
                (example_division.py)
    asp         nothing is cut: applied is applied. What is applied nowhere is dropped, and the next incarnation adopts
                the first task (worker, clock) that some shard lacks; shards that have it drop it as a repetition
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints, example_division, joining_workers, server_changes
from psctl.job import events
from psctl.job.environment import worker_environment
from psctl.job.layout_comparison import difference
from psctl.job.membership_messages import CountUntil, LostWorkerClocks, WorkerGone
from psctl.job.process_messages import HoldSlots, ProcessFailure
from psctl.job.training_messages import Go, Prepare, Resume, Welcome
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

RESIDUAL = "the gradients that its compressed pushes had not sent yet"
"""The error-feedback residual: only its worker has it, between two checkpoints."""

ANSWER_TIMEOUT = 10.0
"""Seconds in which servers must report the pushes that they hold of a lost worker."""


class PendingCut(msgspec.Struct):
    """A lost worker, until the last clock of it that counts is known."""

    worker: Rank
    since: float
    asked: int | None = None  # the epoch in which servers received the request
    clocks: dict[int, int] = {}  # shard -> the last complete clock, and so on: the servers' answers together
    versions: dict[int, int] = {}
    separate_clocks: dict[int, int] = {}
    rank_state_clock: int = -1


class LostWorkers(msgspec.Struct):
    """The workers that were lost since all processes were started."""

    pending: dict[Member, PendingCut] = msgspec.field(default_factory=dict)  # whose cut is not made yet
    cuts: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> the last clock that counts


def host_for_replacement(job: JobState, rank: Rank) -> int | None:
    """Return the host of a lost worker's replacement: its own, else the first with a free slot."""
    if rank.host not in job.lost_hosts:
        return rank.host
    for agent in job.agents:
        workers = sum(each.host == agent.rank for each in job.live("worker"))
        if workers < job.order.hosts[agent.rank].slots:
            return agent.rank
    return None


def can_be_replaced(job: JobState, ranks: Sequence[Rank]) -> bool:
    """Return whether there is a slot for each of these lost workers' replacements, all together."""
    live = job.live("worker")
    free = {
        agent.rank: job.order.hosts[agent.rank].slots - sum(each.host == agent.rank for each in live)
        for agent in job.agents
    }
    homeless = sum(rank.host in job.lost_hosts for rank in ranks)
    return homeless <= sum(slots for slots in free.values() if slots > 0)


def is_replaced(job: JobState, rank: Rank) -> bool:
    """Whether a lost worker is started anew. Rank 0 always is: buffers and optimizer numbers are its own.

    In an elastic job the others continue where no slot is free for it.
    """
    if rank.member.rank == 0 or _is_asp(job):
        return True
    has_slot = job.order.elastic is None or host_for_replacement(job, rank) is not None
    return job.order.on_worker_loss == "wait" and has_slot


def _is_asp(job: JobState) -> bool:
    return job.order.staleness is None


def on_lost(job: JobState, rank: Rank, reason: str) -> None:
    """A worker is lost and the job continues: find the cut, and start its replacement, if it gets one."""
    job.append_loss(rank, reason, residual=RESIDUAL if job.order.compression.feedback else "")
    job.checkpoints.senders.discard(rank.member)
    checkpoints.drop_incomplete(job, f"{rank.member} is lost")
    job.lost_workers.pending[rank.member] = PendingCut(rank, job.now)
    example_division.remove_worker(job, rank.member)
    if is_replaced(job, rank):
        host = host_for_replacement(job, rank)
        assert host is not None, "the job survives only when there is one"
        start_replacement(job, rank, host)
    else:
        example_division.begin_change(job)


def start_replacement(job: JobState, lost: Rank, host: int) -> None:
    """Start the next incarnation of a lost worker."""
    number = lost.member.rank
    job.remove_rank("worker", number)
    local = sum(each.host == host for each in job.live("worker"))
    rank = job.add_rank("worker", number, host, lost.local_rank if host == lost.host else local)
    if host != lost.host:
        job.send(Member("agent", host), HoldSlots(local + 1))
    rank.step, rank.leaving, rank.shares = lost.step, lost.leaving, lost.shares  # it runs the same script
    if lost.leaving:
        job.checkpoints.last_steps[rank.member] = job.checkpoints.last_steps[lost.member]
    job.checkpoints.senders.add(rank.member)
    restarts = job.losses.survived + job.scaling.restarts
    server_changes.start_rank(job, rank, worker_environment(job.order, job.seats(), number, restarts))


def on_clocks(job: JobState, message: LostWorkerClocks) -> None:
    """A server reports which clocks of a lost worker it has whole."""
    cut = job.lost_workers.pending.get(Member("worker", message.rank, message.incarnation))
    if cut is not None and cut.asked is not None:
        cut.clocks.update(message.clocks)
        cut.versions.update(message.versions)
        cut.separate_clocks.update(message.separate_clocks)
        cut.rank_state_clock = max(cut.rank_state_clock, message.rank_state_clock)


def advance(job: JobState) -> ProcessFailure | None:
    """Make the cuts that are possible now; return the failure when one cannot be made."""
    placement = job.shards.placement
    if not job.training or job.all_processes_end:
        return None
    if placement is None:
        return example_division.advance(job)
    shards, pending = len(job.shards.ranges), job.lost_workers.pending
    for member, cut in list(pending.items()):
        if cut.asked != placement.epoch:
            if not placement.transfers:
                pending[member] = PendingCut(cut.worker, job.now, asked=placement.epoch)
                _send_servers(job, WorkerGone(member.rank, member.incarnation))
        elif len(cut.clocks) < shards and job.now - cut.since >= ANSWER_TIMEOUT:
            text = f"the servers did not report within {ANSWER_TIMEOUT:.0f} s which pushes of {member} they hold"
            return job.failure_of(cut.worker, text, code="peer-lost")
    known = list(pending.values())
    if all(cut.asked == placement.epoch and len(cut.clocks) == shards for cut in known):
        cuts = []
        for cut, last in zip(known, _last_clocks(job, known), strict=True):
            if last is None:  # looked at for all before any is cut
                text = _why_no_cut(job, cut)
                return job.failure_of(cut.worker, text, code="peer-lost")
            cuts.append((cut.worker, last))
        for worker, last in cuts:
            del pending[worker.member]
            _cut(job, worker, last)
    return example_division.advance(job)


def _last_clocks(job: JobState, pending: list[PendingCut]) -> list[int | None]:
    """Return for each of these workers, which are lost at once, its last clock that counts.

    Where a shard drops the push of one it drops its whole sum of that clock, and the others push again; lost workers
    can't. So the same clock is the last of all, and their replacements do the next ones again. A worker whose cut was
    made before continues after it already: if that clock had to be dropped, all go back to the last checkpoint.
    """
    lasts = [_last_clock(job, cut) for cut in pending]
    known = [last for last in lasts if last is not None]
    if _is_asp(job) or len(known) < len(lasts) or not pending:
        return lasts
    last = min(known)
    versions = {version for cut in pending for version in cut.versions.values()}
    dropped = any(clock > last for cut in pending for clock in cut.clocks.values())
    cutting = {one.rank for one in job.lost_workers.pending}
    before = any(clock > last for rank, clock in job.lost_workers.cuts.items() if rank not in cutting)
    if max(versions, default=0) > last + 1 or (dropped and before):
        return [None for _ in pending]
    return [last for _ in pending]


def _last_clock(job: JobState, cut: PendingCut) -> int | None:
    """Return the last clock of a lost worker that counts; None when there is no such clock on all shards."""
    last = min(cut.clocks.values())
    if _is_asp(job):  # the replacement repeats from the clock of its saved state, and shards drop what they have
        return min(last, cut.rank_state_clock - 1) if cut.rank_state_clock >= job.progress.first_step else None
    versions = set(cut.versions.values())
    separate = min((cut.clocks | cut.separate_clocks).values())
    if max(versions, default=0) <= separate + 1:
        last = separate
    if cut.worker.member.rank == 0:  # its replacement needs its state of the clock after the cut
        last = min(last, cut.rank_state_clock - 1)
    if max(versions, default=0) > last + 1:
        return None
    cutting = {one.rank for one in job.lost_workers.pending}
    first = min(versions, default=0)  # clock that some shard has not applied
    making = {*job.division.members_at(first)} & {*job.division.members_at(last)} - cutting
    others = [rank.member.rank for rank in job.live("worker") if rank.member.rank in making]
    if last < first or any(job.lost_workers.cuts.get(rank, first - 1) < first for rank in others):
        return last
    return first - 1 if len(versions) == 1 else None  # no worker is left to send the numbers of what was not applied


def _why_no_cut(job: JobState, cut: PendingCut) -> str:
    member = cut.worker.member
    if job.order.step_in_backward and max(cut.versions.values()) > min(cut.clocks.values()) + 1:
        return f"{member} was lost in backward, when some of its step was made (sync.step_in_backward)"
    if member.rank == 0 and cut.rank_state_clock <= min(cut.clocks.values()):
        return f"{member} was lost before its state at the next step's start had reached the servers"
    return f"{member} was lost together with others: shards differ in its last clock"


def _cut(job: JobState, lost: Rank, last: int) -> None:
    member, replaced = lost.member, is_replaced(job, lost)
    _send_servers(job, CountUntil(member.rank, member.incarnation, last))
    job.lost_workers.cuts[member.rank] = last
    example_division.on_cut(job, lost, last + 1, replaced=replaced)
    if replaced:
        job.notice(f"{member} is started again and continues after step {last + 1}")
        rank = job.ranks[Member("worker", member.rank, job.newest_incarnation("worker", member.rank) or 0)]
        rank.step = last + 1
        if rank.leaving and rank.step >= job.checkpoints.last_steps[rank.member]:
            joining_workers.end_idle(job, rank, "it has made all its steps")
        elif rank.joined:
            welcome_replacement(job, rank)


def _send_servers(job: JobState, message: WorkerGone | CountUntil) -> None:
    for rank in job.live("server"):
        if rank.decided:
            job.send(rank.member, message)


# ---- a replacement, while others train -----------------------------------------------------------------------------


def _resume_of(job: JobState, rank: Rank) -> Resume:
    """Return where a replacement continues: after the cut, with the values of the store."""
    return Resume("", job.lost_workers.cuts[rank.member.rank] + 1, {}, [])


def welcome_replacement(job: JobState, rank: Rank) -> None:
    """Welcome a replacement that has joined, once its cut is known."""
    number, lost = rank.member.rank, job.lost_workers
    if number not in lost.cuts or any(one.rank == number for one in lost.pending):
        return
    world, order = job.division.world, job.order
    every = order.checkpoint.every_steps
    job.send(rank.member, Welcome(world, order.seed, every, order.report_seconds, _resume_of(job, rank)))
    job.append_event(events.WorkerJoined(time=job.time, rank=number, host=job.host_name(rank)))


def on_prepared(job: JobState, rank: Rank, message: Prepare) -> ProcessFailure | None:
    """A replacement has reached `prepare`: send it the decision; return a failure if its model differs."""
    assert job.startup.layout is not None
    assert job.shards.placement is not None
    text = difference(Prepare(job.startup.layout, job.startup.buffers), message)
    if text:
        return job.failure_of(rank, f"the model on {rank.member} differs from that of its previous start: {text}")
    rank.decided = True
    job.send(rank.member, server_changes.decision(job, _resume_of(job, rank), job.shards.placement.assignment))
    example_division.send_past_changes(job, rank)
    return None


def on_ready(job: JobState, rank: Rank) -> None:
    """A replacement has its start values: it trains."""
    checkpoints.send_last_cut(job, rank)
    job.send(rank.member, Go())
    job.notice(f"{job.describe(rank)} trains" + (" again" if rank.member.incarnation else ""))
    rank.moved_at = job.now
    if rank.state == "waiting":
        job.move_rank(rank, "go")
