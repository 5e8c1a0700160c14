"""The division of each clock's examples when a worker is lost and not replaced (on_worker_loss: continue).

The problem. The members of a clock share its examples in rank order. When one is lost, the others are within s clocks
(s: staleness) of each other, have drawn batches by the old shares, and cannot return them: their scripts have used
them. And no worker has done the batches that the lost one had drawn of the clocks after c*, its last that counts
(lost_workers.py).

The division. All remaining workers report the first clock that they have not begun, and begin no clock from
there on until they receive more (`NextClockWanted`, `NextClock`). No worker has begun the largest answer, m: from m on
the shares are those of the new members, and the lost one's examples of clocks c*+1 .. m-1 are added to it
(`ExamplesShared`). So every example is in exactly one batch that counts. Where a pass over the data ends before m, its
members make one more batch of those examples; so a worker ends a pass only when all its clocks are applied and it
waits for no message.

Why that is sure. Servers wait for the lost worker until they receive `Members`, which is sent when all answers are in.
So a worker that has a version beyond c* has answered before, and waits for `ExamplesShared`.

Clocks c*+1 .. m-1 are means over fewer examples, divided by the sum of the weights that are there. Checkpoints of
these steps would lack the examples that are added to clock m, and are given up. A rank that is started in mid-run
receives all past divisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints
from psctl.job.membership_messages import CountUntil, ExamplesShared, Members, NextClock, NextClockWanted
from psctl.job.process_messages import ProcessFailure
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

ANSWER_TIMEOUT = 60.0
"""Seconds in which workers must answer: their network threads do, but a library may hold the interpreter for 20 s."""

LATER = "examples of it are consumed in a later step"


class DivisionChange(msgspec.Struct):
    """A change of the members, until it is known from which clock on."""

    since: float
    waiting: set[Member] = msgspec.field(default_factory=set)  # workers that have not answered
    clock: int = 0  # the first that no other worker has begun
    lost: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> its first clock that does not count


class ExampleDivision(msgspec.Struct):
    """The workers that share the examples of each clock."""

    ticket: int = 0
    change: DivisionChange | None = None
    shared: list[ExamplesShared] = msgspec.field(default_factory=list)  # all that workers received
    gone: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> its first clock that does not count


def begin_change(job: JobState) -> None:
    """Ask the others for a clock that none has begun: a worker is lost and is not replaced."""
    division = job.division
    if division.change is None:
        division.ticket += 1
        division.change = DivisionChange(job.now)
        for rank in job.live("worker"):
            if rank.decided and not rank.finished:
                _ask(job, division.change, rank)


def _ask(job: JobState, change: DivisionChange, rank: Rank) -> None:
    change.waiting.add(rank.member)
    job.send(rank.member, NextClockWanted(job.division.ticket))


def on_next_clock(job: JobState, rank: Rank, message: NextClock) -> None:
    """A worker answers with the first clock that it has not begun."""
    change = job.division.change
    if change is not None and message.ticket == job.division.ticket:
        change.waiting.discard(rank.member)
        change.clock = max(change.clock, message.clock)


def remove_worker(job: JobState, member: Member) -> None:
    """Wait no longer for a worker: its cut determines which clocks it has begun, or they count already."""
    if job.division.change is not None:
        job.division.change.waiting.discard(member)


def on_cut(job: JobState, lost: Rank, clock: int, *, replaced: bool) -> None:
    """A lost worker's clocks from this one on do not count."""
    change = job.division.change
    if change is not None:
        change.clock = max(change.clock, clock)
        if not replaced:
            change.lost[lost.member.rank] = clock


def advance(job: JobState) -> ProcessFailure | None:
    """Divide anew when all is known; return the failure when a worker does not answer."""
    change = job.division.change
    if change is None or job.lost_workers.pending:
        return None
    if not change.waiting:
        _divide(job, change)
    elif job.now - change.since >= ANSWER_TIMEOUT:
        late = job.ranks[min(change.waiting)]
        text = f"{late.member} did not report within {ANSWER_TIMEOUT:.0f} s which clocks it has begun"
        return job.failure_of(late, text, code="peer-lost")
    return None


def _divide(job: JobState, change: DivisionChange) -> None:
    division = job.division
    division.change = None
    division.gone.update(change.lost)
    first_lost = min(change.lost.values())
    for message in _members(job, first_lost):
        for rank in job.live("server"):
            if rank.decided:
                job.send(rank.member, message)
    before = division.shared[-1].clock if division.shared else 0
    ranks = [rank.member.rank for rank in job.ranks_of("worker") if rank.member.rank not in division.gone]
    shared = ExamplesShared(division.ticket, max(change.clock, before), ranks, change.lost)
    division.shared.append(shared)
    for rank in job.live("worker"):
        if rank.decided:
            job.send(rank.member, shared)
    checkpoints.drop_steps(job, first_lost + 1, shared.clock, LATER)
    names = ", ".join(f"worker/{rank}" for rank in sorted(change.lost))
    job.notice(
        f"{names} has left; {len(ranks)} workers continue and share the examples anew from step {shared.clock + 1}"
    )


def _members(job: JobState, since: int) -> list[Members]:
    """Return the changes of members from clock `since` on."""
    gone, every = job.division.gone, [rank.member.rank for rank in job.ranks_of("worker")]
    clocks = sorted({clock for clock in gone.values() if clock >= since})
    return [Members(clock, [rank for rank in every if gone.get(rank, clock + 1) > clock]) for clock in clocks]


def send_past_changes(job: JobState, rank: Rank) -> None:
    """Send a rank that was started in mid-run, and has the decision, all changes since."""
    division = job.division
    if rank.member.role == "server":
        for number, clock in sorted(job.lost_workers.cuts.items()):
            job.send(rank.member, CountUntil(number, -1, clock))
        for message in _members(job, 0):
            job.send(rank.member, message)
        return
    for shared in division.shared:
        job.send(rank.member, shared)
    if division.change is not None:
        _ask(job, division.change, rank)
