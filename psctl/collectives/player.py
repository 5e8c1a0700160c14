"""Plays one rank's part of a schedule on vectors, step by step, on the calling thread.

A rank begins its next step when it has received all messages of this step. Receives of the next steps are posted
meanwhile, so no sender waits for a receiver, and the wire is busy while this rank sums. If the channel reports partial
messages, bytes that have arrived are summed while the rest is received (`SPAN`). If receives cannot be posted ahead
(NCCL), a step's messages are posted together.

A thread for each peer, so that a late message delays only its own sums, was built, measured and removed: switches
between threads cost more than the order of the steps. Ring of four ranks on a busy machine with two cores: 64 KB 4 ms
against 22, 1 MB 7 against 22, 100 MB as fast; four hosts of 500 Mbit/s, one of them of 100: 8 MB by shares in
proportion 0.90 s against 1.13, by packed trees 0.72 both, round a ring 1.04 against 1.21.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from psctl.collectives.channel import Channel, Parcel, PeerPiece, PendingTransfer
from psctl.collectives.rank_program import (
    ChunkWrite,
    IncomingMessage,
    OutgoingMessage,
    RankProgram,
    RankStep,
    make_program,
)
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.errors import PeerLost
from psctl.schedule.schedule import Schedule

LENGTHS = 64
"""Lengths of vectors for which the division into chunks is cached."""

SLOTS = 9
"""Steps for which receives are posted at once, this one included."""

SHORT = 1 << 20
"""Bytes of a vector up to which the receives of all steps are posted: latency matters more than memory then."""


SPANS = 4
"""Parts of a chunk, at most, each of which is summed as soon as it has arrived."""

SPAN = 4 << 20
"""Bytes of such a part, at least. Each costs a wake-up: a ring of four ranks on two cores, 100 MB over sealed streams,
took as much processor time with spans of 4 MiB as with one span, and 15% more with spans of 1 MiB."""


class SchedulePlayer:
    """Plays one rank's part of one schedule, on vectors of any length and type.

    Args:
        schedule: what is played; every rank must play the same.
        rank: which node of it this is.
        channel: moves the bytes.
        short: as `StepExecutor` has it.
        what: the operation, for people.
    """

    def __init__(
        self, schedule: Schedule, rank: int, channel: Channel, short: int = SHORT, what: str = "a sum of gradients"
    ) -> None:  # fmt: skip
        self.schedule, self.rank, self._what = schedule, rank, what
        self._channel = channel
        self._program = make_program(schedule, rank)
        self._executor = StepExecutor(self._program, channel, short)
        self._one_exchange = is_one_exchange(schedule)
        self._chunks: dict[int, VectorChunks] = {}
        self._lost: BaseException | None = None

    def play(self, vector: torch.Tensor, chunks: VectorChunks | None = None) -> None:
        """Play the schedule on a vector, in place.

        Args:
            vector: contiguous, one-dimensional; as long and of the same type on every rank.
            chunks: where the chunks are in it, and how they are combined; None: in proportion to their shares, summed.

        Raises:
            PeerLost: a peer is lost; the same error again at every later call.
        """
        assert vector.dim() == 1, "a vector"
        assert vector.is_contiguous(), "contiguous"
        if self._lost is None:
            try:
                with torch.no_grad():
                    self._play(vector, chunks or self._cut(vector.numel()))
                return
            except BaseException as error:
                self._lost = error
                self._channel.abort(f"rank {self.rank} gave up: {error}")
                if not isinstance(error, RuntimeError):
                    raise
        raise PeerLost(
            f"rank {self.rank} lost a peer in {self._what}: {self._lost}",
            "the rank that ended first is named by psctl status",
        ) from self._lost

    def _play(self, vector: torch.Tensor, chunks: VectorChunks) -> None:
        exchange = self._channel.exchange_for(vector.nbytes) if self._one_exchange else None
        if exchange is None:
            self._executor.play(vector, chunks)
        else:
            chunks.write(self._program.writes[0], self.rank, vector, exchange.exchange(vector))

    def _cut(self, length: int) -> VectorChunks:
        if length not in self._chunks:
            if len(self._chunks) == LENGTHS:
                self._chunks.clear()
            self._chunks[length] = VectorChunks(self.schedule.ranges(length))
        return self._chunks[length]


def is_one_exchange(schedule: Schedule) -> bool:
    """Return whether every rank receives all others' whole vectors in one step, and sums them itself."""
    pairs = {(one.source, one.destination) for one in schedule.transfers}
    same = all((one.step, one.chunk, one.action) == (0, 0, "reduce") for one in schedule.transfers)
    return (
        schedule.world == schedule.nodes
        and same
        and len(schedule.transfers) == len(pairs) == schedule.world * (schedule.world - 1) > 0
    )


class StepExecutor:
    """Plays one rank's program.

    Args:
        program: of this rank.
        channel: moves the bytes.
        short: bytes of a vector up to which all steps' messages are expected at once.
    """

    def __init__(self, program: RankProgram, channel: Channel, short: int = SHORT) -> None:
        self._program, self._channel, self._short = program, channel, short
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def play(self, vector: torch.Tensor, chunks: VectorChunks) -> None:
        """Play the program on a vector that is cut into `chunks`."""
        steps, run = self._program.steps, _VectorRun(self._program, self._channel, vector, chunks)
        slots = self._slots(vector, chunks)
        if not self._channel.posts_ahead:
            for step in steps:
                run.exchange(step.out, step.into, step.writes, slots[0])
                run.finish_step(step)
        expected = 0
        for at, step in enumerate(steps if self._channel.posts_ahead else ()):
            for after in range(expected, min(at + len(slots), len(steps))):
                run.post_receives(steps[after].into, slots[after % len(slots)])
                expected = after + 1
            run.post_sends(step.out)
            run.finish_step(step)
            if at >= len(slots):
                run.wait_sent(each.index for each in steps[at - len(slots)].out)
        run.wait_sent(each.index for step in steps for each in step.out)

    def _slots(self, vector: torch.Tensor, chunks: VectorChunks) -> list[torch.Tensor]:
        """Return buffers for staged messages; those of long vectors have the size of one or two steps."""
        in_place = self._channel.reads_in_place
        posted = [[each for each in step.into if not in_place(each.message.source)] for step in self._program.steps]
        most = max((sum(chunks.size(each.message.chunks) for each in step) for step in posted), default=0)
        width = most * vector.element_size()
        if not self._channel.posts_ahead:
            count = 1
        elif vector.numel() * vector.element_size() <= self._short:
            count = max(1, len(self._program.steps))
        else:
            count = min(SLOTS, max(1, 2 * vector.numel() // max(1, most)))
        if self._bytes.numel() < count * width or self._bytes.device != vector.device:
            self._bytes = torch.empty(count * width, dtype=torch.uint8, device=vector.device)
        return [self._bytes[at * width : (at + 1) * width].view(vector.dtype) for at in range(count)]


class _VectorRun:
    """One vector in the steps of a program."""

    def __init__(self, program: RankProgram, channel: Channel, vector: torch.Tensor, chunks: VectorChunks) -> None:
        self._rank, self._writes = program.rank, program.writes
        self._channel, self._vector, self._chunks = channel, vector, chunks
        self._written: set[int] = set()
        self._unsent: dict[int, list[PendingTransfer]] = {}  # by the message's index
        self._sent_messages: set[int] = set()
        self._incoming: dict[int, _Incoming] = {}  # by tag

    def post_receives(self, into: Sequence[IncomingMessage], buffer: torch.Tensor) -> None:
        """Post a step's receives: in place where the old value is not needed any more, else into `buffer`."""
        parcels, counts = self._places(into, buffer, lambda each: each.staged or not self._unused(each))
        self._add_pending(into, counts, parcels, self._channel.post((), parcels))

    def post_sends(self, out: Sequence[OutgoingMessage]) -> None:
        """Post sends."""
        parcels, counts = self._outgoing(out)
        self._sent(out, counts, self._channel.post(parcels, ()))

    def exchange(
        self,
        out: Sequence[OutgoingMessage],
        into: Sequence[IncomingMessage],
        writes: Sequence[ChunkWrite],
        buffer: torch.Tensor,
    ) -> None:
        """Post all that one step sends and receives."""
        direct = {index for each in into if not each.staged for index in each.writes}
        for write in writes:
            if write.index in direct:
                self.wait_sent(write.readers)
        leaving, sent = self._outgoing(out)
        coming, received = self._places(into, buffer, lambda each: each.staged)
        pending = self._channel.post(leaving, coming)
        self._sent(out, sent, pending[: len(leaving)])
        self._add_pending(into, received, coming, pending[len(leaving) :])

    def finish_step(self, step: RankStep) -> None:
        """Wait for a step's messages, and do its writes.

        Pieces read in place are released before this rank waits for peers to release its own: two ranks that exchange a
        chunk would wait for each other. Such a chunk's sum is kept in a buffer until its old value was read.
        """
        staged: dict[int, dict[int, torch.Tensor]] = {}
        coming: dict[int, list[tuple[_Incoming, int]]] = {}  # by write; where its chunk begins in what comes
        in_place_pieces: list[PeerPiece] = []
        for each in step.into:
            if self._channel.reads_in_place(each.message.source):
                parts = self._read_in_place(each, in_place_pieces)
            else:
                parts = self._delivered(each, coming)
            for index, part in zip(each.writes, parts, strict=False):  # none: received in place
                staged.setdefault(index, {})[each.message.source] = part
        unreleased = {each.index for each in step.out} if any(piece.is_awaited for piece in in_place_pieces) else set()
        late: list[tuple[ChunkWrite, torch.Tensor]] = []
        for write in step.writes:
            if write.index not in staged:
                pass
            elif unreleased.isdisjoint(write.readers):
                self.wait_sent(write.readers)
                self._write(write, staged[write.index], coming.get(write.index, []))
            else:
                late.append((write, torch.empty_like(self._chunks.of(self._vector, write.chunk))))
                self._write(write, staged[write.index], coming.get(write.index, []), late[-1][1])
            self._written.add(write.index)
        for piece in in_place_pieces:
            piece.release()
        for write, total in late:
            self.wait_sent(write.readers)
            self._chunks.of(self._vector, write.chunk).copy_(total)

    def _read_in_place(self, each: IncomingMessage, in_place_pieces: list[PeerPiece]) -> list[torch.Tensor]:
        """Wait for a message's pieces in the peer's memory; return them by chunk."""
        chunks = each.message.chunks
        mine = [self._channel.next_piece(each.message.source, each.tag) for _ in range(self._chunks.pieces(chunks))]
        in_place_pieces += mine
        return self._chunks.split([piece.read(self._vector.dtype) for piece in mine], self._vector, chunks)

    def _delivered(self, each: IncomingMessage, coming: dict[int, list[tuple[_Incoming, int]]]) -> list[torch.Tensor]:
        """Return a staged message by chunk, and note which bytes to wait for; wait here for one received in place."""
        found = self._incoming.pop(each.tag)
        if found.buffer is None:
            found.await_first(self._channel)
            return []
        at, parts = 0, self._chunks.parts(found.buffer, each.message.chunks)
        for index, part in zip(each.writes, parts, strict=True):
            coming.setdefault(index, []).append((found, at))
            at += part.nbytes
        return parts

    def _write(
        self, write: ChunkWrite, staged: Mapping[int, torch.Tensor], coming: Sequence[tuple[_Incoming, int]],
        into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Do a write, part by part as its operands arrive."""
        size, width = self._chunks.size((write.chunk,)), self._vector.element_size()
        span = max(SPAN // width, -(-size // SPANS)) if coming else max(1, size)
        for start in range(0, size, span):
            stop = min(start + span, size)
            for each, at in coming:
                each.await_first(self._channel, at + stop * width)
            self._chunks.write(write, self._rank, self._vector, staged, into, slice(start, stop))

    def wait_sent(self, messages: Iterable[int]) -> None:
        """Wait until these posted messages have been sent."""
        for index in messages:
            for one in self._unsent.pop(index, ()):
                one.wait()
            self._sent_messages.add(index)

    def _unused(self, each: IncomingMessage) -> bool:
        """Return whether the chunks of a message may be overwritten."""
        return all(
            (write.before < 0 or write.before in self._written) and self._sent_messages.issuperset(write.readers)
            for write in (self._writes[index] for index in each.writes)
        )

    def _outgoing(self, out: Sequence[OutgoingMessage]) -> tuple[list[Parcel], list[int]]:
        parcels, counts = [], []
        for each in out:
            pieces = self._chunks.places(self._vector, each.message.chunks)
            parcels += [Parcel(piece, each.message.destination, each.tag) for piece in pieces]
            counts.append(len(pieces))
        return parcels, counts

    def _places(
        self, into: Sequence[IncomingMessage], buffer: torch.Tensor, is_staged: Callable[[IncomingMessage], bool]
    ) -> tuple[list[Parcel], list[int]]:
        """Return the parcels to receive, and how many each message has; notes staged messages."""
        parcels, counts, at = [], [], 0
        for each in into:
            if self._channel.reads_in_place(each.message.source):
                counts.append(0)
                continue
            chunks = each.message.chunks
            if is_staged(each):
                size = self._chunks.size(chunks)
                own = buffer[at : at + size]
                pieces, at = self._chunks.staging_pieces(own, chunks), at + size
                self._incoming[each.tag] = _Incoming(own)
            else:
                pieces = self._chunks.places(self._vector, chunks)
                self._incoming[each.tag] = _Incoming(None)
            parcels += [Parcel(piece, each.message.source, each.tag) for piece in pieces]
            counts.append(len(pieces))
        return parcels, counts

    def _sent(self, out: Sequence[OutgoingMessage], counts: Sequence[int], pending: Sequence[PendingTransfer]) -> None:
        for each, (start, stop) in zip(out, _runs(counts), strict=True):
            self._unsent[each.index] = list(pending[start:stop])

    def _add_pending(
        self,
        into: Sequence[IncomingMessage],
        counts: Sequence[int],
        parcels: Sequence[Parcel],
        pending: Sequence[PendingTransfer],
    ) -> None:
        for each, (start, stop) in zip(into, _runs(counts), strict=True):
            for parcel, one in zip(parcels[start:stop], pending[start:stop], strict=True):
                self._incoming[each.tag].add(parcel.piece.nbytes, one)


class _Incoming:
    """A message that is received, in consecutive pieces.

    Args:
        buffer: where it is staged; None: it is received in place.
    """

    __slots__ = ("_pieces", "_size", "buffer")

    def __init__(self, buffer: torch.Tensor | None) -> None:
        self.buffer = buffer
        self._size = 0
        self._pieces: deque[tuple[int, int, PendingTransfer]] = deque()  # from which byte to which

    def add(self, size: int, pending: PendingTransfer) -> None:
        """Add a piece of `size` bytes."""
        self._pieces.append((self._size, self._size + size, pending))
        self._size += size

    def await_first(self, channel: Channel, size: int | None = None) -> None:
        """Wait for the first bytes; None: for all."""
        size = self._size if size is None else size
        while self._pieces and self._pieces[0][0] < size:
            start, stop, pending = self._pieces[0]
            if not channel.arrived(pending, min(size, stop) - start):
                return
            self._pieces.popleft()


def _runs(counts: Sequence[int]) -> Iterable[tuple[int, int]]:
    return pairwise([sum(counts[:at]) for at in range(len(counts) + 1)])
