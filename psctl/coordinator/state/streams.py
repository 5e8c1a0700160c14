"""Streams: which worker reads which shard, and what of each shard is in steps that count.

A stream is a list of shards; each is read by one worker at a time, from its beginning or from where another stopped.
A worker asks for a shard when it has too few open, and reports with every batch what it has open after it. So for
every step it is known what was read before: the position in a checkpoint of step s, or of a lost worker whose clocks up
to s-1 count, is that after its last batch of a step before s.

The order. Under bsp, and so under collectives, requests are granted in the order (batch, rank), whatever the order in
which they arrive: a request waits until no worker can send an earlier one. So the same shards go to the same workers in
every run. Under ssp they are granted as they arrive: fast workers read more.

The end. Workers run out at different times. One that has nothing for a batch waits until another has an example for it
(`NoShardLeft`: it takes part with weight 0), until a lost worker's shard is returned, or until no worker has anything:
then all are at the same batch, and the epoch ends for all (`StreamEnded`). Where lost workers may not be replaced, a
worker asks without an example in hand only when its earlier clocks are sure to count; so nothing is returned after
the end.

A lost worker that is not replaced: its shards are returned at the positions of its last clock that counts
(example_division.py). One that is replaced: the replacement begins at its step with the shards that were open then, and
is given those that followed in the same order, so it reads the same batches again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from psctl.job.stream_messages import (
    BatchSize,
    BatchTaken,
    NoShardLeft,
    ShardGiven,
    ShardPosition,
    ShardWanted,
    StreamEnded,
    StreamOpened,
    StreamPosition,
    WorkerStreamMessage,
)
from psctl.types import MOST_LISTED, Member, State

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

KEPT = 8
"""Batches, beyond the staleness, whose positions are kept."""

MOST_STREAMS = 64
"""Streams that a script may read."""

Open = tuple[ShardPosition, ...]


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch that a worker has taken."""

    batch: int
    step: int
    examples: int
    given: Open
    """Shards that the worker was given for it."""
    open: Open
    """What it had open afterwards."""


class ShardReader(msgspec.Struct):
    """What one worker reads."""

    open: Open = ()
    """Before the first record."""
    records: list[BatchRecord] = msgspec.field(default_factory=list)
    given: Open = ()
    """Shards that it was given since the last record."""
    again: Open = ()
    """Shards that an earlier incarnation was given, which this one gets in the same order."""
    next_batch: int = -1
    """The batch of its next request; -1: it has not begun to read."""
    wanted: ShardWanted | None = None
    waits: bool = False
    """It wants a shard, has no example, and there is no shard."""

    def open_at(self, step: int) -> Open:
        """Return the shards that are open when `step` steps are finished."""
        return next((each.open for each in reversed(self.records) if each.step < step), self.open)

    def held_at(self, step: int) -> Open:
        """Return those, and all shards that it was given since, at the positions at which it was."""
        later = [one for each in self.records if each.step >= step for one in each.given]
        return (*self.open_at(step), *later, *self.given, *self.again)

    def go_back(self, keep: int) -> None:
        """Forget all but the first `keep` records; what was given since is given again."""
        dropped, self.records = self.records[keep:], self.records[:keep]
        self.again = (*(one for each in dropped for one in each.given), *self.given, *self.again)
        self.given, self.wanted, self.waits = (), None, False

    def forget(self, before: int) -> None:
        """Forget the records of steps before this one."""
        while len(self.records) > 1 and self.records[1].step < before:
            self.open = self.records.pop(0).open


class OpenBatch(msgspec.Struct):
    """A batch of which some workers have not told their examples."""

    step: int
    examples: dict[int, int] = msgspec.field(default_factory=dict)
    """By rank."""


class StreamPass(msgspec.Struct):
    """One epoch of one stream."""

    stream: int
    epoch: int
    shards: int
    names: str
    unread: list[tuple[int, int]]
    """Ranges of places that nobody reads, in order."""
    partly: list[ShardPosition] = msgspec.field(default_factory=list)
    """Shards that nobody reads, of which examples were taken; they are given first."""
    readers: dict[int, ShardReader] = msgspec.field(default_factory=dict)
    taken: dict[int, OpenBatch] = msgspec.field(default_factory=dict)
    """By number: the batches whose size is not known."""
    sizes: dict[int, int] = msgspec.field(default_factory=dict)
    """By batch: examples over all workers, of the last ones."""
    ended: int | None = None
    """The batch that there is not."""

    def take_first(self) -> ShardPosition | None:
        """Remove the shard that is to be given next, and return it."""
        if self.partly:
            return self.partly.pop(0)
        if not self.unread:
            return None
        first, stop = self.unread[0]
        self.unread[:1] = [(first + 1, stop)] if first + 1 < stop else []
        return ShardPosition(first)

    def put_back(self, shards: Iterable[ShardPosition]) -> None:
        """Return shards, for others to read."""
        for one in shards:
            if one.examples:
                insort(self.partly, one)
            else:
                self.unread = merged([*self.unread, (one.place, one.place + 1)])


class Streams(msgspec.Struct):
    """All streams of a job."""

    passes: list[StreamPass] = msgspec.field(default_factory=list)
    """Those begun last, two of each stream."""
    resumed: list[State] = msgspec.field(default_factory=list)
    """Of the checkpoint that the job continues from."""
    leaving: set[int] = msgspec.field(default_factory=set)
    """Ranks that leave, whose shards are returned when they have ended."""

    def find(self, stream: int, epoch: int) -> StreamPass | None:
        """Return a pass; None if it was not begun."""
        return next((each for each in self.passes if (each.stream, each.epoch) == (stream, epoch)), None)


def resumed_streams(state: Mapping[str, object] | None) -> Streams:
    """Return the streams of a job that continues from this state of a checkpoint."""
    saved = (state or {}).get("streams")
    return Streams(resumed=list(saved) if isinstance(saved, list) else [])


# ---- messages of workers -------------------------------------------------------------------------------------------


def on_message(job: JobState, rank: Rank, message: WorkerStreamMessage) -> None:
    """Handle a worker's message about a stream."""
    number = rank.member.rank
    if isinstance(message, StreamOpened):
        _open(job, rank, message)
        return
    found = job.streams.find(message.stream, message.epoch)
    reader = found.readers.get(number) if found is not None else None
    if found is None or reader is None or message.batch != reader.next_batch:
        return  # it was sent before all started again, or it breaks the protocol
    if isinstance(message, ShardWanted):
        reader.wanted, reader.waits = message, False
    elif isinstance(message, BatchTaken):
        _take(job, found, number, reader, message)
    _serve(job, found)


def why_refused(job: JobState, rank: int, message: WorkerStreamMessage) -> str:
    """Return why a message cannot be true, or ""."""
    if not isinstance(message, BatchTaken):
        return ""
    found = job.streams.find(message.stream, message.epoch)
    reader = found.readers.get(rank) if found is not None else None
    if reader is None or reader.next_batch != message.batch:
        return ""
    had = {one.place: one.examples for one in (*reader.open_at(1 << 62), *reader.given)}
    now = {one.place: one.examples for one in message.open}
    wrong = [place for place, examples in now.items() if examples < had.get(place, examples + 1)]
    if wrong or len(now) < len(message.open):
        return f"it has not shard {wrong[0] if wrong else message.open[0].place} of stream {message.stream} open so"
    return ""


def _open(job: JobState, rank: Rank, message: StreamOpened) -> None:
    found = job.streams.find(message.stream, message.epoch)
    problem = _why_not(job, message, found)
    if not problem[0] and found is None:
        found, problem = _begin(job, message)
    stream, epoch, batch = message.stream, message.epoch, message.batch
    if problem[0] or found is None:
        answer = StreamPosition(stream, epoch, batch, problem=problem[0], hint=problem[1])
        job.send(rank.member, answer)
        return
    reader = found.readers.setdefault(rank.member.rank, ShardReader())
    reader.go_back(sum(each.batch < batch for each in reader.records))
    reader.next_batch = batch
    for number, each in found.taken.items():
        if number >= batch:
            each.examples.pop(rank.member.rank, None)
    job.send(rank.member, StreamPosition(stream, epoch, batch, reader.open_at(1 << 62), sized=job.order.staleness == 0))
    _serve(job, found)


def _why_not(job: JobState, message: StreamOpened, found: StreamPass | None) -> tuple[str, str]:
    """Return why a stream cannot be read, and the cure, or ("", "")."""
    if job.order.staleness is None:
        return (
            "a stream under consistency asp: workers would end an epoch after different numbers of steps",
            "set consistency: bsp or {ssp: N} under sync: in the job file",
        )
    if job.order.period > 1:
        return (
            "a stream with sync.period above 1: a worker that runs out first would step alone, without examples",
            "remove period: from the job file",
        )
    if found is not None and (found.shards, found.names) != (message.shards, message.names):
        return (
            f"the list of {message.shards} shards differs from that of another worker, which has {found.shards}",
            "give the same list in the same order on every rank: sort what glob or listdir return",
        )
    streams = {each.stream for each in job.streams.passes}
    if message.stream not in streams and len(streams) >= MOST_STREAMS:
        return f"more than {MOST_STREAMS} streams", "make each loader once"
    return "", ""


def _begin(job: JobState, message: StreamOpened) -> tuple[StreamPass | None, tuple[str, str]]:
    """Begin an epoch of a stream: as the checkpoint has it, if it is of this epoch."""
    found = StreamPass(message.stream, message.epoch, message.shards, message.names, merged([(0, message.shards)]))
    for saved in job.streams.resumed:
        if (saved.get("stream"), saved.get("epoch")) == (message.stream, message.epoch):
            given = (message.shards, message.names)
            if (saved.get("shards"), saved.get("names")) != given:
                return None, (
                    f"the checkpoint is in the middle of another list of shards, of {saved.get('shards')}",
                    "give the same list in the same order, or begin anew: --resume never",
                )
            _restore(job, found, saved)
    older = [each for each in job.streams.passes if each.stream == found.stream]
    if len(older) > 1:
        job.streams.passes.remove(older[0])
    job.streams.passes.append(found)
    return found, ("", "")


def _take(job: JobState, found: StreamPass, rank: int, reader: ShardReader, message: BatchTaken) -> None:
    """Record a batch."""
    reader.records.append(BatchRecord(message.batch, message.step, message.examples, reader.given, message.open))
    reader.given, reader.wanted, reader.waits, reader.next_batch = (), None, False, message.batch + 1
    keep = min([message.step - KEPT - (job.order.staleness or 0), *job.checkpoints.open])
    reader.forget(keep)
    size = found.sizes.get(message.batch)
    if size is not None:  # a replacement repeats it
        job.send(_member(job, rank), BatchSize(found.stream, found.epoch, message.batch, size))
    else:
        found.taken.setdefault(message.batch, OpenBatch(message.step)).examples[rank] = message.examples


def _member(job: JobState, rank: int) -> Member:
    return Member("worker", rank, job.newest_incarnation("worker", rank) or 0)


# ---- grants --------------------------------------------------------------------------------------------------------


def advance(job: JobState) -> None:
    """Return the shards of workers that have left, when no checkpoint needs their positions."""
    if not job.streams.leaving:
        return
    live = {rank.member.rank for rank in job.live("worker") if not rank.finished}
    for rank in sorted(job.streams.leaving - live):
        readers = [each.readers[rank] for each in job.streams.passes if rank in each.readers]
        last = max((each.records[-1].step for each in readers if each.records), default=-1)
        if not any(step <= last + 1 for step in job.checkpoints.open):
            job.streams.leaving.discard(rank)
            _return_shards(job, rank, None)


def on_finished(job: JobState) -> None:
    """A worker's script has ended: nothing waits for its requests any more."""
    for found in job.streams.passes:
        _serve(job, found)


def on_divided(job: JobState, lost: Mapping[int, int], leaving: Iterable[int]) -> None:
    """The members have changed: return what lost workers read beyond their last clocks that count.

    Args:
        job: the job.
        lost: rank -> its first clock that does not count.
        leaving: ranks that make no clocks any more when they have ended.
    """
    job.streams.leaving |= {*leaving} - {*lost}
    for rank, clock in lost.items():
        job.streams.leaving.discard(rank)
        _return_shards(job, rank, clock)
    for found in job.streams.passes:
        _serve(job, found)


def _return_shards(job: JobState, rank: int, clock: int | None) -> None:
    """Return a worker's shards as they were before the batches of `clock`; None: as they are."""
    for found in job.streams.passes:
        reader = found.readers.pop(rank, None)
        if reader is None:
            continue
        if clock is not None:
            reader.go_back(sum(each.step < clock for each in reader.records))
        found.put_back((*reader.open_at(1 << 62), *reader.given, *reader.again))
        for each in found.taken.values():
            each.examples.pop(rank, None)
        for other in found.readers.values():
            other.waits = False
        _serve(job, found)


def _members(job: JobState, step: int) -> set[int]:
    """Return the ranks that read batches of this step."""
    finished = {rank.member.rank for rank in job.live("worker") if rank.finished}
    return {*job.division.members_at(step)} - finished


def _serve(job: JobState, found: StreamPass) -> None:
    """Answer all requests that can be answered now, and send the sizes of complete batches."""
    while (rank := _next_request(job, found)) is not None:
        _answer(job, found, rank)
    _answer_waiting(job, found)
    for batch, taken in sorted(found.taken.items()):
        if taken.examples.keys() >= _members(job, taken.step):
            _send_size(job, found, batch)


def _next_request(job: JobState, found: StreamPass) -> int | None:
    """Return the rank whose request is to be answered next."""
    asking = [
        (reader.next_batch, rank, reader.wanted.step)
        for rank, reader in found.readers.items()
        if reader.wanted is not None and not reader.waits
    ]
    if not asking:
        return None
    batch, rank, step = min(asking)
    if job.order.staleness == 0 and found.ended is None:  # later only replacements ask, for what was given before
        none = ShardReader()
        for other in _members(job, step):
            reader = found.readers.get(other, none)
            if not reader.waits and (reader.next_batch, other) < (batch, rank):
                return None  # it may still ask for an earlier batch
    return rank


def _answer(job: JobState, found: StreamPass, rank: int) -> None:
    reader = found.readers[rank]
    wanted = reader.wanted
    assert wanted is not None, "it was chosen for its request"
    shard: ShardPosition | None
    if reader.again:
        shard, reader.again = reader.again[0], reader.again[1:]
    elif found.ended is not None:
        shard = None
    else:
        shard = found.take_first()
    if shard is not None:
        reader.given, reader.wanted = (*reader.given, shard), None
        job.send(_member(job, rank), ShardGiven(found.stream, found.epoch, wanted.batch, shard))
    elif wanted.examples:
        reader.wanted = None
        job.send(_member(job, rank), NoShardLeft(found.stream, found.epoch, wanted.batch))
    else:
        reader.waits = True


def _answer_waiting(job: JobState, found: StreamPass) -> None:
    """Answer workers that have nothing for their batch: others have, or nobody has."""
    waiting = {rank: each.wanted for rank, each in sorted(found.readers.items()) if each.waits and each.wanted}
    if not waiting:
        return
    batches = {each.batch for each in waiting.values()}
    members = _members(job, min(each.step for each in waiting.values()))
    if waiting.keys() >= members and len(batches) == 1 and found.ended is None and not job.streams.leaving:
        found.ended = min(batches)
    for rank, wanted in waiting.items():
        answer: StreamEnded | NoShardLeft
        batch, taken = wanted.batch, found.taken.get(wanted.batch)
        if found.ended is not None and batch >= found.ended:
            answer = StreamEnded(found.stream, found.epoch, batch)
        elif found.sizes.get(batch) or (taken is not None and any(taken.examples.values())):
            answer = NoShardLeft(found.stream, found.epoch, batch)
        else:
            continue
        found.readers[rank].wanted, found.readers[rank].waits = None, False
        job.send(_member(job, rank), answer)


def _send_size(job: JobState, found: StreamPass, batch: int) -> None:
    found.sizes[batch] = size = sum(found.taken.pop(batch).examples.values())
    for old in [each for each in found.sizes if each < batch - KEPT - (job.order.staleness or 0)]:
        del found.sizes[old]
    if job.order.staleness == 0:
        for rank in found.readers:
            job.send(_member(job, rank), BatchSize(found.stream, found.epoch, batch, size))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def state_at(job: JobState, step: int) -> list[State]:
    """Return the streams of the checkpoint of a step, as JSON values."""
    return [_state_of(each, step, job.division.world) for each in job.streams.passes]


def _state_of(found: StreamPass, step: int, world: int) -> State:
    opened = {rank: reader.open_at(step) for rank, reader in sorted(found.readers.items())}
    reading = {one.place for each in opened.values() for one in each}
    held = {one.place: one for reader in found.readers.values() for one in reader.held_at(step)}
    left = [*found.partly, *(one for place, one in sorted(held.items()) if place not in reading)]
    unread = [*found.unread, *((one.place, one.place + 1) for one in left if not one.examples)]
    return {
        "stream": found.stream, "epoch": found.epoch, "shards": found.shards, "names": found.names, "world": world,
        "open": [[rank, [[one.place, one.examples] for one in each]] for rank, each in opened.items() if each],
        "partly": [[one.place, one.examples] for one in sorted(left) if one.examples],
        "unread": [list(each) for each in merged(unread)],
    }  # fmt: skip


def _restore(job: JobState, found: StreamPass, saved: State) -> None:
    """Continue a pass as a checkpoint has it: as many workers as then continue with the shards that they had."""
    found.unread = merged((int(first), int(stop)) for first, stop in saved["unread"])
    found.partly = [ShardPosition(*each) for each in saved["partly"]]
    for rank, every in saved["open"]:
        opened = tuple(ShardPosition(*each) for each in every)
        if saved["world"] == job.division.world and rank < job.division.world:
            found.readers[rank] = ShardReader(opened)
        else:
            found.put_back(opened)


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return these ranges of places in order, with those that touch joined, and without empty ones."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif first < min(stop, MOST_LISTED + 1):
            found.append((first, stop))
    return found
