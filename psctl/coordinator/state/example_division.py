"""Who shares the examples of each clock, when a worker is lost and nobody takes its place (on_worker_loss: continue).

The problem. The examples of a clock are shared by its members in rank order. When one dies, the others are somewhere
within s clocks (s: staleness) of each other, have drawn batches by the old shares, and cannot give them back: their
scripts have used them. And nobody has done what the dead one had drawn of the clocks after c*, its last that counts
(death_cut.py).

The division. All workers that are left are asked for the first clock that they have not begun, and begin none from
there on until they hear more (`NextClockWanted`, `NextClock`). The largest answer, m, is a clock that nobody has begun:
from it on the shares are those of the new members, and the dead one's examples of clocks c*+1 .. m-1 join it
(`ExamplesShared`). So every example is in exactly one batch that counts. Where a pass over the data ends before m, its
members make one more batch of those examples; for that, a worker ends a pass only when all clocks of it are applied
and it waits for no message.

Why that is sure. Servers wait for the dead one until they hear `Members`, which is sent when all answers are in. So a
worker that has a version beyond c* has answered before, and knows that it must wait for `ExamplesShared`.

Clocks c*+1 .. m-1 are means over fewer examples, divided by the sum of the weights that are there. Checkpoints of these
steps would lack what joins clock m, and are given up. Who is started in mid-run hears all that was decided before.
"""

from __future__ import annotations

from psctl.coordinator.state import training
from psctl.coordinator.state.instructions import DiscardCheckpoint
from psctl.coordinator.state.job_state import DivisionChange, JobState, Rank
from psctl.job.membership_messages import CountUntil, ExamplesShared, Members, NextClock, NextClockWanted
from psctl.job.process_messages import ProcessFailure
from psctl.types import Member

PATIENCE = 60.0
"""Seconds in which workers must answer: their network threads do, but a library may hold the interpreter for 20 s."""

LATER = "examples of it are done in a later step"


def ask(job: JobState) -> None:
    """A worker is gone for good: ask the others for a clock that nobody has begun."""
    division = job.division
    if division.change is None:
        division.ticket += 1
        division.change = DivisionChange(job.now)
        for rank in job.live("worker"):
            if rank.decided and not rank.finished:
                _ask_one(job, division.change, rank)


def _ask_one(job: JobState, change: DivisionChange, rank: Rank) -> None:
    change.waiting.add(rank.member)
    job.tell(rank.member, NextClockWanted(job.division.ticket))


def drawn(job: JobState, rank: Rank, message: NextClock) -> None:
    """A worker says what it has begun."""
    change = job.division.change
    if change is not None and message.ticket == job.division.ticket:
        change.waiting.discard(rank.member)
        change.clock = max(change.clock, message.clock)


def without(job: JobState, member: Member) -> None:
    """A worker will answer no more: what it has begun is told by its cut, or counts already."""
    if job.division.change is not None:
        job.division.change.waiting.discard(member)


def cut(job: JobState, dead: Rank, clock: int, *, replaced: bool) -> None:
    """A dead worker's clocks from this one on do not count."""
    change = job.division.change
    if change is not None:
        change.clock = max(change.clock, clock)
        if not replaced:
            change.lost[dead.member.rank] = clock


def advance(job: JobState) -> ProcessFailure | None:
    """Go on when all is known; return the failure when somebody does not answer."""
    change = job.division.change
    if change is None or job.deaths:
        return None
    if not change.waiting:
        _divide(job, change)
    elif job.now - change.since >= PATIENCE:
        late = job.ranks[min(change.waiting)]
        text = f"{late.member} did not tell within {PATIENCE:.0f} s which clocks it has begun"
        return job.failure(late, text, code="peer-lost")
    return None


def _divide(job: JobState, change: DivisionChange) -> None:
    division = job.division
    division.change = None
    division.gone.update(change.lost)
    for message in _members(job, min(change.lost.values())):
        for rank in job.live("server"):
            if rank.decided:
                job.tell(rank.member, message)
    before = division.shared[-1].clock if division.shared else 0
    ranks = [rank.member.rank for rank in job.of("worker") if rank.member.rank not in division.gone]
    shared = ExamplesShared(division.ticket, max(change.clock, before), ranks, change.lost)
    division.shared.append(shared)
    for rank in job.live("worker"):
        if rank.decided:
            job.tell(rank.member, shared)
    _drop_saves(job, min(change.lost.values()) + 1, shared.clock)
    names = ", ".join(f"worker/{rank}" for rank in sorted(change.lost))
    job.say(f"{names} is gone; {len(ranks)} workers go on, and share the examples anew from step {shared.clock + 1}")


def _members(job: JobState, since: int) -> list[Members]:
    """Return who takes part from clock `since` on."""
    gone, every = job.division.gone, [rank.member.rank for rank in job.of("worker")]
    clocks = sorted({clock for clock in gone.values() if clock >= since})
    return [Members(clock, [rank for rank in every if gone.get(rank, clock + 1) > clock]) for clock in clocks]


def _drop_saves(job: JobState, first: int, last: int) -> None:
    """Give up the checkpoints of these steps, also such as have not begun."""
    for step in range(first, last + 1):
        job.out.append(DiscardCheckpoint(step))
        if job.saves.drop(step):
            job.say(f"the checkpoint of step {step} is given up: {LATER}")
        training.saved(job, step, LATER)


def newcomer(job: JobState, rank: Rank) -> None:
    """A rank that was started in mid-run has been told the decision: tell it what was decided since."""
    division = job.division
    if rank.member.role == "server":
        for number, clock in sorted(job.cuts.items()):
            job.tell(rank.member, CountUntil(number, -1, clock))
        for message in _members(job, 0):
            job.tell(rank.member, message)
        return
    for shared in division.shared:
        job.tell(rank.member, shared)
    if division.change is not None:
        _ask_one(job, division.change, rank)
