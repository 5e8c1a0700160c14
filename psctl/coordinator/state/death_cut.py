"""A worker's death under ps, cut consistently: which clock of the dead one is the last that counts, on every shard.

The problem. A worker pushes its gradient of clock c to every shard; when it dies, some have it and some have not. Were
each shard to take what it has, the parameters of one clock would hold the dead one's examples in part, and nobody
could do the rest again without doing something twice.

The cut. Servers are told who is dead (`WorkerGone`): from then on nothing of that incarnation comes in, so what a
server holds of it is final, and it answers what that is (`LostWorkerClocks`: shard -> last whole clock). The least
of all answers, c*, is the last clock that every shard has whole: it counts everywhere (`CountUntil`), and what a shard
has beyond it is dropped everywhere. So each clock of the dead one is applied on all shards or on none.

Why dropping is possible: no shard has applied a clock beyond c*. A rank sends its `Step` of clock c to a server only
when every push of that clock to other servers is there, and a shard applies clock c only with every rank's Step of it;
so if any shard applied c, all shards have the dead one's push of c, and c <= c*. A version beyond c*+1 would
contradict this; it can come only of a server and a worker lost at once, and then the whole job goes back to its last
checkpoint.

When servers are asked the shards must stay where they are: a cut begins when no hand-over is awaited, none begins
before it ends, and a server's death in between asks anew in the assignment without it.

A host sum (one push for several workers of a host) that holds the dead one's push can't be taken apart: where it is cut
the whole sum is dropped, and the others push theirs again, so it counts for nobody who is dead: of a second dead one,
whose cut was made before, the push would be lost. But where some shard has all ranks' orders of the clock, or has
applied it, every push of it is everywhere, nobody will ever be cut before it, and the host sums count.

Of two who are dead at once the earlier cut is both's: dropping the push of one drops what a shard has summed of that
clock, and who is dead can't push it again. Cuts are made when the servers have answered for all who are dead.

A clock is applied with somebody's numbers (learning rates ...). Where no other worker is alive that gave them for all
that counts and is not applied, or will (all died at about the same time), the last clock that counts is the last that
was applied.

After the cut:
    wait        the next incarnation is started at once, and let in when c* is known: it pulls version c*+1 and does its
                next clocks again, with the same examples and random numbers: what comes out is equal to the bit
    continue    from clock c*+1 on only the others are members (`Members`); its examples go to them
    (example_division.py)
    asp         nothing is cut: applied is applied. What is applied nowhere is dropped, and the next incarnation adopts
                the first task (worker, clock) that some shard lacks; shards that have it drop it as a repetition
"""

from __future__ import annotations

from psctl.coordinator.state import example_division, server_changes
from psctl.coordinator.state.instructions import StartMember
from psctl.coordinator.state.job_state import JobState, Rank, WorkerDeath
from psctl.job import events
from psctl.job.environment import worker_environment
from psctl.job.layout_comparison import difference
from psctl.job.membership_messages import CountUntil, LostWorkerClocks, WorkerGone
from psctl.job.process_messages import HoldSlots, ProcessFailure
from psctl.job.training_messages import Go, Prepare, Resume, Welcome
from psctl.types import Member

RESIDUAL = "what its compressed pushes had left out until now"
"""The error-feedback residual: only its worker has it, between two checkpoints."""

PATIENCE = 10.0
"""Seconds in which servers must answer what they hold of a dead worker."""


def place_for(job: JobState, rank: Rank) -> int | None:
    """Return the host where a dead worker's replacement runs: its own, else the first with a free slot."""
    if rank.host not in job.lost_hosts:
        return rank.host
    for agent in job.agents:
        there = sum(each.host == agent.rank for each in job.live("worker"))
        if there < job.order.hosts[agent.rank].slots:
            return agent.rank
    return None


def lost(job: JobState, rank: Rank, reason: str) -> None:
    """A worker died and the job goes on: find the cut, and start its replacement where there is to be one."""
    left_out = RESIDUAL if job.order.compression.feedback else ""
    where = job.host(rank)
    job.append(events.WorkerLost(time=job.time, rank=rank.member.rank, host=where, reason=reason, lost=left_out))
    job.saves.sources.discard(rank.member)
    server_changes.abandon(job, f"{rank.member} died")
    job.deaths[rank.member] = WorkerDeath(rank, job.now)
    example_division.without(job, rank.member)
    if replaced(job, rank):
        host = place_for(job, rank)
        assert host is not None, "the job survives only when there is one"
        _order(job, rank, host)
    else:
        example_division.ask(job)


def replaced(job: JobState, rank: Rank) -> bool:
    """Is a dead worker started anew? Rank 0 always is: what only one rank keeps (buffers, numbers) is its own."""
    return job.order.on_worker_loss == "wait" or rank.member.rank == 0 or _asp(job)


def _asp(job: JobState) -> bool:
    return job.order.staleness is None


def _order(job: JobState, before: Rank, host: int) -> None:
    job.forget("worker", before.member.rank)
    local = sum(each.host == host for each in job.live("worker"))
    rank = job.add("worker", before.member.rank, host, before.local_rank if host == before.host else local)
    if host != before.host:
        job.tell(Member("agent", host), HoldSlots(local + 1))
    rank.step = before.step
    job.saves.sources.add(rank.member)
    job.tell_state(rank)
    environment = worker_environment(job.order, job.seats(), before.member.rank, job.losses + job.scalings)
    job.out.append(StartMember(rank.member, len(job.of("worker")), host, rank.local_rank, environment))


def held(job: JobState, message: LostWorkerClocks) -> None:
    """A server tells what it has whole of a dead worker."""
    death = job.deaths.get(Member("worker", message.rank, message.incarnation))
    if death is not None and death.asked is not None:
        death.clocks.update(message.clocks)
        death.versions.update(message.versions)
        death.apart.update(message.apart)
        death.aside = max(death.aside, message.aside)


def advance(job: JobState) -> ProcessFailure | None:
    """Go on with cuts; return the failure when one cannot be made."""
    holdings = job.holdings
    if holdings is None or not job.training or job.leaving:
        return None
    for death in list(job.deaths.values()):
        dead = death.worker.member
        if death.asked is None or death.asked != holdings.epoch:
            if holdings.handing:
                continue
            death.asked, death.since, death.clocks, death.versions = holdings.epoch, job.now, {}, {}
            death.aside, death.apart = -1, {}
            _tell_servers(job, WorkerGone(dead.rank, dead.incarnation))
        elif len(death.clocks) < len(job.shards) and job.now - death.since >= PATIENCE:
            text = f"the servers did not tell within {PATIENCE:.0f} s what they hold of {dead}"
            return job.failure(death.worker, text, code="peer-lost")
    deaths = list(job.deaths.values())
    if all(death.asked == holdings.epoch and len(death.clocks) == len(job.shards) for death in deaths):
        lasts = _together(job, deaths)
        for death, last in zip(deaths, lasts, strict=True):
            if last is None:  # before anybody is cut
                text = f"{death.worker.member} was lost together with others: no clock of it is the last on all shards"
                return job.failure(death.worker, text, code="peer-lost")
        for death, last in zip(deaths, lasts, strict=True):
            assert last is not None, "looked at above"
            del job.deaths[death.worker.member]
            _cut(job, death.worker, last)
    return example_division.advance(job)


def _together(job: JobState, deaths: list[WorkerDeath]) -> list[int | None]:
    """Return for each of these workers, who are dead at once, its last clock that counts.

    Where a shard drops the push of one it drops its whole sum of that clock, and the others push again; the dead can't.
    So of those who died together the same clock is the last, and they do the next ones again. Whose cut was made before
    goes on after it already: if that clock were to be dropped, all go back to the last checkpoint.
    """
    lasts = [_last(job, death) for death in deaths]
    known = [last for last in lasts if last is not None]
    if _asp(job) or len(known) < len(lasts) or not deaths:
        return lasts
    last = min(known)
    versions = {version for death in deaths for version in death.versions.values()}
    dropped = any(clock > last for death in deaths for clock in death.clocks.values())
    dying = {dead.rank for dead in job.deaths}
    before = any(clock > last for rank, clock in job.cuts.items() if rank not in dying)
    if max(versions, default=0) > last + 1 or (dropped and before):
        return [None for _ in deaths]
    return [last for _ in deaths]


def _last(job: JobState, death: WorkerDeath) -> int | None:
    """Return the last clock of a dead worker that counts; None when there is no such clock on all shards."""
    last = min(death.clocks.values())
    if _asp(job):  # who joins does again what its own state was left at, and shards drop what they have
        return min(last, death.aside - 1) if death.aside >= job.first_step else None
    versions = set(death.versions.values())
    apart = min((death.clocks | death.apart).values())
    if max(versions, default=0) <= apart + 1:
        last = apart
    if death.worker.member.rank == 0 and death.aside - 1 < last:  # who joins needs its state of the clock after the cut
        last = death.aside - 1
    if max(versions, default=0) > last + 1:
        return None
    dying = {dead.rank for dead in job.deaths}
    alive = [rank.member.rank for rank in job.live("worker") if rank.member.rank not in dying]
    first = min(versions, default=0)  # clock that some shard has not applied
    if last < first or any(job.cuts.get(rank, first - 1) < first for rank in alive):
        return last
    return first - 1 if len(versions) == 1 else None  # nobody is left who would order what was not applied


def _cut(job: JobState, dead: Rank, last: int) -> None:
    member = dead.member
    _tell_servers(job, CountUntil(member.rank, member.incarnation, last))
    job.cuts[member.rank] = last
    example_division.cut(job, dead, last + 1, replaced=replaced(job, dead))
    if replaced(job, dead):
        job.say(f"{member} is started again and goes on after step {last + 1}")
        rank = job.ranks[Member("worker", member.rank, job.newest("worker", member.rank) or 0)]
        rank.step = last + 1
        if rank.joined:
            welcome(job, rank)


def _tell_servers(job: JobState, message: WorkerGone | CountUntil) -> None:
    for rank in job.live("server"):
        if rank.decided:
            job.tell(rank.member, message)


# ---- a worker that comes in while others train -----------------------------------------------------------------------


def resume_of(job: JobState, rank: Rank) -> Resume:
    """Return where a replacement goes on: after the cut, with what the store has."""
    return Resume("", job.cuts[rank.member.rank] + 1, {}, [])


def welcome(job: JobState, rank: Rank) -> None:
    """A replacement has joined: let it in as soon as its cut is known."""
    if rank.member.rank not in job.cuts or any(dead.rank == rank.member.rank for dead in job.deaths):
        return
    order = job.order
    told = Welcome(
        len(job.of("worker")), order.seed, order.checkpoint.every_steps, order.report_seconds, resume_of(job, rank)
    )
    job.tell(rank.member, told)
    job.append(events.WorkerJoined(time=job.time, rank=rank.member.rank, host=job.host(rank)))


def prepared(job: JobState, rank: Rank, message: Prepare) -> ProcessFailure | None:
    """A replacement has reached `prepare`: tell it how gradients are synchronised; return a failure if it differs."""
    assert job.layout is not None
    assert job.holdings is not None
    text = difference(Prepare(job.layout, job.buffers), message)
    if text:
        return job.failure(rank, f"the model on {rank.member} differs from that of its start before: {text}")
    rank.decided = True
    job.tell(rank.member, server_changes.decision(job, resume_of(job, rank), job.holdings.assignment))
    example_division.newcomer(job, rank)
    return None


def ready(job: JobState, rank: Rank) -> None:
    """A replacement has its start values: it trains."""
    job.tell(rank.member, Go())
    job.say(f"{job.where(rank)} trains again")
    rank.moved = job.now
    if rank.state == "waiting":
        job.move_rank(rank, "go")
