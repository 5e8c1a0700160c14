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

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from psctl.coordinator.streams.shard_readers import (
    BatchRecord,
    OpenBatch,
    ShardReader,
    StreamPass,
    merged,
    restore,
    state_of,
)
from psctl.job.message import JobMessage
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
from psctl.job.training_messages import Prepare
from psctl.orders import JobOrder
from psctl.types import Member, Role, State

KEPT = 8
"""Batches, beyond the staleness, whose positions are kept."""

MOST_STREAMS = 64
"""Streams that a script may read."""


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


class Worker(Protocol):
    """A worker, as its job knows it."""

    @property
    def member(self) -> Member:
        """Its rank and incarnation."""

    @property
    def finished(self) -> bool:
        """Whether its script has ended."""

    @property
    def prepared(self) -> Prepare | None:
        """Its model; None: not sent yet."""


class Division(Protocol):
    """The workers that share examples."""

    @property
    def world(self) -> int:
        """Workers when all were started."""

    def members_at(self, clock: int) -> Sequence[int]:
        """Return the ranks that are members of a clock."""


class Checkpoints(Protocol):
    """The checkpoints of a job."""

    @property
    def open(self) -> Mapping[int, object]:
        """By step: those that are being made."""


class StreamingJob(Protocol):
    """The state of a job, as far as streams depend on it."""

    order: JobOrder
    streams: Streams

    @property
    def division(self) -> Division:
        """The workers that share examples."""

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints."""

    def live(self, role: str) -> Sequence[Worker]:
        """Return the ranks of one role whose process has not ended."""

    def newest_incarnation(self, role: Role, number: int) -> int | None:
        """Return the newest incarnation of a rank."""

    def send(self, member: Member, message: JobMessage) -> None:
        """Send a message to a member."""


def resumed_streams(state: Mapping[str, object] | None) -> Streams:
    """Return the streams of a job that continues from this state of a checkpoint."""
    saved = (state or {}).get("streams")
    return Streams(resumed=list(saved) if isinstance(saved, list) else [])


# ---- messages of workers -------------------------------------------------------------------------------------------


def on_message(job: StreamingJob, rank: Worker, message: WorkerStreamMessage) -> None:
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


def why_refused(job: StreamingJob, rank: int, message: WorkerStreamMessage) -> str:
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


def _open(job: StreamingJob, rank: Worker, message: StreamOpened) -> None:
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
    found.gone.discard(rank.member.rank)
    reader.go_back(sum(each.batch < batch for each in reader.records))
    reader.next_batch = batch
    for number, each in found.taken.items():
        if number >= batch:
            each.examples.pop(rank.member.rank, None)
    job.send(rank.member, StreamPosition(stream, epoch, batch, reader.open_at(1 << 62), sized=job.order.staleness == 0))
    _serve(job, found)


def _why_not(job: StreamingJob, message: StreamOpened, found: StreamPass | None) -> tuple[str, str]:
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
    if any(each.prepared is not None and each.prepared.hooked for each in job.live("worker")):
        return (
            "a stream under psctl.accelerate_ddp: DistributedDataParallel gives a rank without examples equal weight",
            "train the plain model with run.prepare(model, optimizer)",
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


def _begin(job: StreamingJob, message: StreamOpened) -> tuple[StreamPass | None, tuple[str, str]]:
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
            restore(found, saved, job.division.world)
    older = [each for each in job.streams.passes if each.stream == found.stream]
    if len(older) > 1:
        job.streams.passes.remove(older[0])
    job.streams.passes.append(found)
    return found, ("", "")


def _take(job: StreamingJob, found: StreamPass, rank: int, reader: ShardReader, message: BatchTaken) -> None:
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


def _member(job: StreamingJob, rank: int) -> Member:
    return Member("worker", rank, job.newest_incarnation("worker", rank) or 0)


# ---- grants --------------------------------------------------------------------------------------------------------


def advance(job: StreamingJob) -> None:
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


def on_finished(job: StreamingJob) -> None:
    """A worker's script has ended: nothing waits for its requests any more."""
    for found in job.streams.passes:
        _serve(job, found)


def on_divided(job: StreamingJob, lost: Mapping[int, int], leaving: Iterable[int]) -> None:
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


def _return_shards(job: StreamingJob, rank: int, clock: int | None) -> None:
    """Return a worker's shards as they were before the batches of `clock`; None: as they are."""
    for found in job.streams.passes:
        reader = found.readers.pop(rank, None)
        if reader is None:
            continue
        found.gone.add(rank)
        if clock is not None:
            reader.go_back(sum(each.step < clock for each in reader.records))
        found.put_back((*reader.open_at(1 << 62), *reader.given, *reader.again))
        for each in found.taken.values():  # the batches of clocks that count keep their examples: others wait for them
            if clock is not None and each.step >= clock:
                each.examples.pop(rank, None)
        for other in found.readers.values():
            other.waits = False
        _serve(job, found)


def _members(job: StreamingJob, step: int) -> set[int]:
    """Return the ranks that read batches of this step."""
    finished = {rank.member.rank for rank in job.live("worker") if rank.finished}
    return {*job.division.members_at(step)} - finished


def _serve(job: StreamingJob, found: StreamPass) -> None:
    """Answer all requests that can be answered now, and send the sizes of complete batches."""
    while (rank := _next_request(job, found)) is not None:
        _answer(job, found, rank)
    _answer_waiting(job, found)
    for batch, taken in sorted(found.taken.items()):
        if taken.examples.keys() >= _members(job, taken.step):
            _send_size(job, found, batch)


def _next_request(job: StreamingJob, found: StreamPass) -> int | None:
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
        for other in _members(job, step) - found.gone:
            reader = found.readers.get(other, none)
            if not reader.waits and (reader.next_batch, other) < (batch, rank):
                return None  # it may still ask for an earlier batch
    return rank


def _answer(job: StreamingJob, found: StreamPass, rank: int) -> None:
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


def _answer_waiting(job: StreamingJob, found: StreamPass) -> None:
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


def _send_size(job: StreamingJob, found: StreamPass, batch: int) -> None:
    found.sizes[batch] = size = sum(found.taken.pop(batch).examples.values())
    for old in [each for each in found.sizes if each < batch - KEPT - (job.order.staleness or 0)]:
        del found.sizes[old]
    if job.order.staleness == 0:
        for rank in found.readers:
            job.send(_member(job, rank), BatchSize(found.stream, found.epoch, batch, size))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def state_at(job: StreamingJob, step: int) -> list[State]:
    """Return the streams of the checkpoint of a step, as JSON values."""
    return [state_of(each, step, job.division.world) for each in job.streams.passes]
