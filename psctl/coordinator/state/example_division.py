"""The division of each clock's examples when workers are lost and not replaced, join or leave while others train.

The problem. The members of a clock share its examples in rank order. When one is lost, the others are within s clocks
(s: staleness) of each other, have drawn batches by the old shares, and cannot return them: their scripts have used
them. And no worker has done the batches that the lost one had drawn of the clocks after c*, its last that counts
(lost_workers.py).

The division. All remaining workers report the first clock that they have not begun, and begin no clock from
there on until they receive more (`NextClockWanted`, `NextClock`). For one that is being replaced its cut answers. No
worker has begun the largest answer, m: from m on the shares are those of the new members, and the lost one's examples
of clocks c*+1 .. m-1 are added to it (`ExamplesShared`). So every example is in exactly one batch that counts. Where a
pass over the data ends before m, its members make one more batch of those examples; so where lost workers may not be
replaced, a worker ends a pass only when all its clocks are applied and it waits for no message.

Why that is sure. Servers wait for the lost worker until they receive `Members`, which is sent when all answers are in.
So a worker that has a version beyond c* has answered before, and waits for `ExamplesShared`. New workers are members
from m on: a server that did not know them would apply clock m without them. So where workers join, `ExamplesShared` is
sent when all servers have answered `MembersSet`. Workers that leave make all clocks before m, and end when these are
applied.

Shares by speed (`loader: {share: speed}`). When the first steps are measured, and more and more rarely afterwards, the
coordinator makes parts of each worker's examples and seconds, waits left out, and begins a change without other
members: from its clock m on shares are in proportion to the parts. Gradients are weighted by examples anyway, so the
mean stays that over all examples. When members change all have as many again, and are measured anew.

Clocks c*+1 .. m-1 are means over fewer examples, divided by the sum of the weights that are there. Checkpoints of
these steps would lack the examples that are added to clock m, and are given up. A rank that is started in mid-run
receives all past divisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints
from psctl.coordinator.streams import shard_grants
from psctl.job.examples import parts_by_speed
from psctl.job.membership_messages import CountUntil, ExamplesShared, Members, MembersSet, NextClock, NextClockWanted
from psctl.job.process_messages import ProcessFailure
from psctl.job.training_messages import WorkerReport
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

ANSWER_TIMEOUT = 60.0
"""Seconds in which workers must answer: their network threads do, but a library may hold the interpreter for 20 s."""

FIRST_STEPS, MOST_STEPS = 8, 1000
"""Steps that are measured before examples are shared by speed, and at most before they are shared anew."""

SECONDS = 1.0
"""Seconds of computing that the fastest worker must have been measured for."""

WORTH = 0.05
"""The part of the slowest worker's time that other shares must save."""

LATER = "examples of it are consumed in a later step"


class Term(msgspec.Struct, frozen=True):
    """A rank is a member, or is none any more, from a clock on."""

    clock: int
    rank: int
    member: bool


class DivisionChange(msgspec.Struct):
    """A change of the members, until it is known from which clock on."""

    since: float
    waiting: set[Member] = msgspec.field(default_factory=set)  # workers that have not answered
    clock: int = 0  # the first that no other worker has begun
    lost: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> its first clock that does not count
    joining: list[Member] = msgspec.field(default_factory=list)
    leaving: list[int] = msgspec.field(default_factory=list)
    asked: set[Member] = msgspec.field(default_factory=set)  # servers that received the new members
    unset: set[Member] = msgspec.field(default_factory=set)  # those that have not answered
    sent: set[int] = msgspec.field(default_factory=set)  # first clocks of new members that servers received
    parts: list[int] = msgspec.field(default_factory=list)  # of the members, which do not change

    @property
    def only_parts(self) -> bool:
        """Whether the members stay, and only their parts change."""
        return bool(self.parts) and not (self.lost or self.joining or self.leaving)


class SpeedMeasurement(msgspec.Struct):
    """What workers have computed since examples were shared anew."""

    since: int = 0
    """The clock from which on steps count."""
    reported: dict[int, int] = msgspec.field(default_factory=dict)
    """By rank: the last step of its last report."""
    steps: dict[int, int] = msgspec.field(default_factory=dict)
    examples: dict[int, float] = msgspec.field(default_factory=dict)
    seconds: dict[int, float] = msgspec.field(default_factory=dict)


class ExampleDivision(msgspec.Struct):
    """The workers that share the examples of each clock."""

    world: int = 0  # workers when all were started: ranks 0 .. world-1 are the first members
    ticket: int = 0
    members_ticket: int = 0
    change: DivisionChange | None = None
    decided: DivisionChange | None = None  # whose workers joining_workers.py takes in and lets go
    shared: list[ExamplesShared] = msgspec.field(default_factory=list)  # all that workers received
    speeds: SpeedMeasurement = msgspec.field(default_factory=SpeedMeasurement)
    wanted_steps: int = FIRST_STEPS
    """Steps to measure before examples are shared anew."""
    terms: list[Term] = msgspec.field(default_factory=list)  # in the order in which they were decided

    def members_at(self, clock: int, new: Sequence[Term] = ()) -> list[int]:
        """Return the ranks that are members of a clock; `new` are terms that are not decided yet."""
        found = set(range(self.world))
        for term in (*self.terms, *new):
            if term.clock <= clock:
                (found.add if term.member else found.discard)(term.rank)
        return sorted(found)


def begin_change(
    job: JobState, *, joining: Iterable[Member] = (), leaving: Iterable[int] = (), parts: Iterable[int] = ()
) -> None:
    """Ask the workers for a clock that none has begun: one is lost and not replaced, some join or leave, or examples
    are shared by other parts."""
    division = job.division
    if division.change is None:
        division.ticket += 1
        division.change = DivisionChange(job.now, joining=list(joining), leaving=list(leaving), parts=list(parts))
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


def on_report(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """A worker reports its progress: measure its speed, and share examples by it when that is worth it."""
    division, number = job.division, rank.member.rank
    if job.order.share != "speed" or not job.training or division.change is not None:
        return
    speeds = division.speeds
    before, speeds.reported[number] = speeds.reported.get(number), message.step
    steps = message.step - before if before is not None else 0
    if before is None or before <= speeds.since or steps < 1:
        return  # a part of the time was not measured, or by other shares
    for kept, more in ((speeds.examples, message.examples), (speeds.seconds, message.compute_seconds)):
        kept[number] = kept.get(number, 0.0) + more
    speeds.steps[number] = speeds.steps.get(number, 0) + steps
    members = division.members_at(message.step)
    measured = all(speeds.steps.get(one, 0) >= division.wanted_steps for one in members)
    if not measured or min(speeds.seconds[one] for one in members) < SECONDS or _is_unsettled(job):
        return
    workers = job.live("worker")
    hooked = any(each.prepared is not None and each.prepared.hooked for each in workers)
    if hooked or not all(each.shares for each in workers):
        why = "DistributedDataParallel counts ranks equally" if hooked else "the script's batches are not run.loader's"
        job.notice_once(("share", "speed"), f"loader.share: speed has no effect: {why}")
        return
    _share_by_speed(job, members)


def _is_unsettled(job: JobState) -> bool:
    """Whether workers are replaced, join or end."""
    return bool(job.workers_being_replaced or job.lost_workers.pending or job.joining.members or job.all_processes_end)


def _share_by_speed(job: JobState, members: Sequence[int]) -> None:
    division, speeds = job.division, job.division.speeds
    a_step = {rank: 1 / speeds.steps[rank] for rank in members}
    parts, saved = parts_by_speed(
        {rank: speeds.examples[rank] * each for rank, each in a_step.items()},
        {rank: speeds.seconds[rank] * each for rank, each in a_step.items()},
    )
    division.wanted_steps = min(2 * division.wanted_steps, MOST_STEPS)
    division.speeds = SpeedMeasurement(max(speeds.reported.values()), speeds.reported)
    if saved >= WORTH:
        begin_change(job, parts=parts)


def on_members_set(job: JobState, server: Rank, message: MembersSet) -> None:
    """A server knows the new members."""
    change = job.division.change
    if change is not None and message.ticket == job.division.members_ticket:
        change.unset.discard(server.member)


def remove_worker(job: JobState, member: Member) -> None:
    """Wait no longer for a worker: its cut determines which clocks it has begun, or they count already."""
    if job.division.change is not None:
        job.division.change.waiting.discard(member)


def remove_joining(job: JobState, member: Member) -> None:
    """A worker that was to join has ended."""
    change = job.division.change
    if change is not None and member in change.joining:
        change.joining.remove(member)
        change.asked.clear()


def on_cut(job: JobState, lost: Rank, clock: int, *, replaced: bool) -> None:
    """A lost worker's clocks from this one on do not count."""
    change = job.division.change
    if change is not None:
        change.clock = max(change.clock, clock)
        if not replaced:
            change.lost[lost.member.rank] = clock
            change.asked.clear()


def advance(job: JobState) -> ProcessFailure | None:
    """Divide anew when all is known; return the failure when a worker does not answer."""
    change = job.division.change
    if change is None or job.lost_workers.pending:
        return None
    if change.waiting:
        if job.now - change.since < ANSWER_TIMEOUT:
            return None
        late = job.ranks[min(change.waiting)]
        text = f"{late.member} did not report within {ANSWER_TIMEOUT:.0f} s which clocks it has begun"
        return job.failure_of(late, text, code="peer-lost")
    if change.only_parts:
        _divide(job, change, _first_clock(job, change))
        return None
    if change.joining and job.checkpoints.proposed is not None:
        return None  # its common step must lie before the first clock of those that join
    clock = _first_clock(job, change)
    if _are_set(job, change, clock):
        _divide(job, change, clock)
    return None


def _first_clock(job: JobState, change: DivisionChange) -> int:
    before = job.division.shared[-1].clock if job.division.shared else 0
    cut = job.checkpoints.last_cut if change.joining else None
    begun = max(job.lost_workers.cuts.values(), default=-1) + 1  # a replacement may not be there yet to answer
    return max(change.clock, before, begun, cut.step if cut is not None else 0)


def _are_set(job: JobState, change: DivisionChange, clock: int) -> bool:
    """Send servers the new members; return whether all that must know them before workers do have answered."""
    division, servers = job.division, {rank.member for rank in job.live("server") if rank.decided}
    new = _new_terms(change, clock)
    clocks = change.sent | {term.clock for term in new}  # what was sent before may hold no more
    clocks |= {term.clock for term in division.terms if term.clock > min(clocks, default=clock)}
    changes = [Members(at, division.members_at(at, new)) for at in sorted(clocks)]
    if change.joining and not change.asked:
        division.members_ticket += 1
        change.unset.clear()
    for server in sorted(servers - change.asked):
        for message in changes:
            ticket = division.members_ticket if change.joining else 0
            job.send(server, msgspec.structs.replace(message, ticket=ticket))
    if not change.joining:
        return True
    change.sent |= clocks
    change.unset |= servers - change.asked
    change.asked |= servers
    return not change.unset & servers


def _new_terms(change: DivisionChange, clock: int) -> list[Term]:
    terms = [Term(first, rank, member=False) for rank, first in sorted(change.lost.items())]
    terms += [Term(clock, member.rank, member=True) for member in change.joining]
    return terms + [Term(clock, rank, member=False) for rank in change.leaving if rank not in change.lost]


def _divide(job: JobState, change: DivisionChange, clock: int) -> None:
    division = job.division
    division.change = None
    division.terms += _new_terms(change, clock)
    ranks = division.members_at(clock)
    parts = change.parts if len(change.parts) == len(ranks) and change.only_parts else []
    if not change.only_parts:
        division.wanted_steps = FIRST_STEPS
    division.speeds = SpeedMeasurement(clock)
    shared = ExamplesShared(division.ticket, clock, ranks, change.lost, parts)
    division.shared.append(shared)
    for rank in job.live("worker"):
        if rank.decided:
            job.send(rank.member, shared)
    if not change.only_parts:
        division.decided = msgspec.structs.replace(change, clock=clock)
    shard_grants.on_divided(job, change.lost, change.leaving)
    if change.lost:
        checkpoints.drop_steps(job, min(change.lost.values()) + 1, clock, LATER)
    gone = [f"worker/{rank}" for rank in sorted({*change.lost, *change.leaving})]
    new = [job.describe(job.ranks[member]) for member in change.joining]
    moves = [f"{', '.join(names)} {verb}" for names, verb in ((new, "joined"), (gone, "left")) if names]
    if parts:
        shares = ", ".join(f"worker/{rank} {part / sum(parts):.0%}" for rank, part in zip(ranks, parts, strict=True))
        job.notice(f"examples are shared by measured speed from step {clock + 1} on: {shares}")
    if moves:
        text = f"{len(ranks)} workers share the examples from step {clock + 1} on"
        job.notice(f"{' and '.join(moves)}; {text}")


def send_past_changes(job: JobState, rank: Rank) -> None:
    """Send a rank that was started in mid-run, and has the decision, all changes since."""
    division = job.division
    if rank.member.role == "server":
        for number, clock in sorted(job.lost_workers.cuts.items()):
            job.send(rank.member, CountUntil(number, -1, clock))
        for clock in sorted({term.clock for term in division.terms}):
            job.send(rank.member, Members(clock, division.members_at(clock)))
        return
    for shared in division.shared:
        job.send(rank.member, shared)
    if division.change is not None:
        _ask(job, division.change, rank)
