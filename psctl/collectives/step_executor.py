"""Plays a schedule on one vector, step by step, on the calling thread.

A rank goes on to its next step when what it receives in this one is there. What the next steps bring is expected
meanwhile, so no sender waits for a receiver that is not there yet, and the wire is busy while this rank sums. What of
this step has come is summed while the rest is on its way, where the channel tells (`SPAN`). Where the channel can't be
asked ahead (NCCL) a step's messages are posted together.

Waiting with a thread for each peer, so that a message that is late holds back none but its own, was built and measured
and is gone: hand-overs between threads cost more than the order of the steps. Ring of four ranks on a busy machine with
two cores: 64 KB 4 ms against 22, 1 MB 7 against 22, 100 MB as fast; four hosts of 500 Mbit/s, one of them of 100: 8 MB
by shares in proportion 0.90 s against 1.13, by packed trees 0.72 both, round a ring 1.04 against 1.21.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from psctl.collectives.channel import Channel, LentPiece, Parcel, PendingTransfer
from psctl.collectives.rank_program import ChunkWrite, IncomingMessage, OutgoingMessage, RankProgram, RankStep
from psctl.collectives.schedule_chunks import VectorChunks

SLOTS = 9
"""Steps for which messages are expected at once: this one and the next; what comes later finds its place free."""

SHORT = 1 << 20
"""Bytes of a vector up to which all steps' are: memory does not count then, each sender that must ask does."""


SPANS = 4
"""Parts of a chunk, at most, of which each is summed as soon as it has come."""

SPAN = 4 << 20
"""Bytes of such a part, at least. Each is a wake-up: a ring of four ranks on two cores, 100 MB
over sealed streams, took as much processor time by spans of 4 MiB as in one, and 15% more by spans of 1 MiB."""


class StepExecutor:
    """Plays one rank's script.

    Args:
        script: what is played.
        channel: moves the bytes.
        short: bytes of a vector up to which all steps' messages are expected at once.
    """

    def __init__(self, script: RankProgram, channel: Channel, short: int = SHORT) -> None:
        self._script, self._channel, self._short = script, channel, short
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def play(self, vector: torch.Tensor, chunks: VectorChunks) -> None:
        """Play it on a vector that is cut so."""
        steps, round_ = self._script.steps, _Round(self._script, self._channel, vector, chunks)
        slots = self._slots(vector, chunks)
        if not self._channel.ahead:
            for step in steps:
                round_.exchange(step.out, step.into, step.writes, slots[0])
                round_.take(step)
        expected = 0
        for at, step in enumerate(steps if self._channel.ahead else ()):
            for after in range(expected, min(at + len(slots), len(steps))):
                round_.expect(steps[after].into, slots[after % len(slots)])
                expected = after + 1
            round_.send(step.out)
            round_.take(step)
            if at >= len(slots):
                round_.have_left(each.index for each in steps[at - len(slots)].out)
        round_.have_left(each.index for step in steps for each in step.out)

    def _slots(self, vector: torch.Tensor, chunks: VectorChunks) -> list[torch.Tensor]:
        """Return places for what steps put aside, for long vectors as large as two or one step: the same memory."""
        lends = self._channel.lends
        posted = [[each for each in step.into if not lends(each.message.source)] for step in self._script.steps]
        most = max((sum(chunks.size(each.message.chunks) for each in step) for step in posted), default=0)
        width = most * vector.element_size()
        if not self._channel.ahead:
            count = 1
        elif vector.numel() * vector.element_size() <= self._short:
            count = max(1, len(self._script.steps))
        else:
            count = min(SLOTS, max(1, 2 * vector.numel() // max(1, most)))
        if self._bytes.numel() < count * width or self._bytes.device != vector.device:
            self._bytes = torch.empty(count * width, dtype=torch.uint8, device=vector.device)
        return [self._bytes[at * width : (at + 1) * width].view(vector.dtype) for at in range(count)]


class _Round:
    """One vector on its way through the steps."""

    def __init__(self, script: RankProgram, channel: Channel, vector: torch.Tensor, chunks: VectorChunks) -> None:
        self._rank, self._writes = script.rank, script.writes
        self._channel, self._vector, self._chunks = channel, vector, chunks
        self._written: set[int] = set()
        self._leaving: dict[int, list[PendingTransfer]] = {}  # by the message's index
        self._left: set[int] = set()
        self._coming: dict[int, _Coming] = {}  # by tag

    def expect(self, into: Sequence[IncomingMessage], buffer: torch.Tensor) -> None:
        """Post a step's receives: where they belong if nobody needs what is there any more, else aside."""
        parcels, counts = self._places(into, buffer, lambda each: each.staged or not self._unused(each))
        self._came(into, counts, parcels, self._channel.post((), parcels))

    def send(self, out: Sequence[OutgoingMessage]) -> None:
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
                self.have_left(write.readers)
        leaving, sent = self._outgoing(out)
        coming, received = self._places(into, buffer, lambda each: each.staged)
        pending = self._channel.post(leaving, coming)
        self._sent(out, sent, pending[: len(leaving)])
        self._came(into, received, coming, pending[len(leaving) :])

    def take(self, step: RankStep) -> None:
        """Wait for what a step brings, and write it.

        What is lent is given back before this rank waits for what it has lent itself in this step: two that exchange a
        chunk would wait for each other. So such a chunk's sum stands aside until the old value was read.
        """
        aside: dict[int, dict[int, torch.Tensor]] = {}
        coming: dict[int, list[tuple[_Coming, int]]] = {}  # by write; where its chunk begins in what comes
        loans: list[LentPiece] = []
        for each in step.into:
            if self._channel.lends(each.message.source):
                parts = self._lent(each, loans)
            else:
                parts = self._delivered(each, coming)
            for index, part in zip(each.writes, parts, strict=False):  # none: they arrived where they belong
                aside.setdefault(index, {})[each.message.source] = part
        owing = {each.index for each in step.out} if any(loan.owed for loan in loans) else set()
        late: list[tuple[ChunkWrite, torch.Tensor]] = []
        for write in step.writes:
            if write.index not in aside:
                pass
            elif owing.isdisjoint(write.readers):
                self.have_left(write.readers)
                self._write(write, aside[write.index], coming.get(write.index, []))
            else:
                late.append((write, torch.empty_like(self._chunks.of(self._vector, write.chunk))))
                self._write(write, aside[write.index], coming.get(write.index, []), late[-1][1])
            self._written.add(write.index)
        for loan in loans:
            loan.release()
        for write, total in late:
            self.have_left(write.readers)
            self._chunks.of(self._vector, write.chunk).copy_(total)

    def _lent(self, each: IncomingMessage, loans: list[LentPiece]) -> list[torch.Tensor]:
        """Wait for what a peer lends; return it by chunk."""
        chunks = each.message.chunks
        mine = [self._channel.borrow(each.message.source, each.tag) for _ in range(self._chunks.pieces(chunks))]
        loans += mine
        return self._chunks.lent([loan.read(self._vector.dtype) for loan in mine], self._vector, chunks)

    def _delivered(self, each: IncomingMessage, coming: dict[int, list[tuple[_Coming, int]]]) -> list[torch.Tensor]:
        """Return by chunk where what was posted is put aside, and note what it waits for; else wait for it here."""
        found = self._coming.pop(each.tag)
        if found.buffer is None:
            found.await_first(self._channel)
            return []
        at, parts = 0, self._chunks.parts(found.buffer, each.message.chunks)
        for index, part in zip(each.writes, parts, strict=True):
            coming.setdefault(index, []).append((found, at))
            at += part.nbytes
        return parts

    def _write(
        self, write: ChunkWrite, aside: Mapping[int, torch.Tensor], coming: Sequence[tuple[_Coming, int]],
        into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Do a write as what it needs comes in."""
        size, width = self._chunks.size((write.chunk,)), self._vector.element_size()
        span = max(SPAN // width, -(-size // SPANS)) if coming else max(1, size)
        for start in range(0, size, span):
            stop = min(start + span, size)
            for each, at in coming:
                each.await_first(self._channel, at + stop * width)
            self._chunks.write(write, self._rank, self._vector, aside, into, slice(start, stop))

    def have_left(self, messages: Iterable[int]) -> None:
        """Wait until these messages, which were posted, have left."""
        for index in messages:
            for one in self._leaving.pop(index, ()):
                one.wait()
            self._left.add(index)

    def _unused(self, each: IncomingMessage) -> bool:
        """Return whether the chunks of a message may be overwritten already."""
        return all(
            (write.before < 0 or write.before in self._written) and self._left.issuperset(write.readers)
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
        self, into: Sequence[IncomingMessage], buffer: torch.Tensor, aside: Callable[[IncomingMessage], bool]
    ) -> tuple[list[Parcel], list[int]]:
        """Return what to receive where; notes what is put aside."""
        parcels, counts, at = [], [], 0
        for each in into:
            if self._channel.lends(each.message.source):
                counts.append(0)
                continue
            chunks = each.message.chunks
            if aside(each):
                size = self._chunks.size(chunks)
                own = buffer[at : at + size]
                pieces, at = self._chunks.aside(own, chunks), at + size
                self._coming[each.tag] = _Coming(own)
            else:
                pieces = self._chunks.places(self._vector, chunks)
                self._coming[each.tag] = _Coming(None)
            parcels += [Parcel(piece, each.message.source, each.tag) for piece in pieces]
            counts.append(len(pieces))
        return parcels, counts

    def _sent(self, out: Sequence[OutgoingMessage], counts: Sequence[int], pending: Sequence[PendingTransfer]) -> None:
        for each, (start, stop) in zip(out, _runs(counts), strict=True):
            self._leaving[each.index] = list(pending[start:stop])

    def _came(
        self,
        into: Sequence[IncomingMessage],
        counts: Sequence[int],
        parcels: Sequence[Parcel],
        pending: Sequence[PendingTransfer],
    ) -> None:
        for each, (start, stop) in zip(into, _runs(counts), strict=True):
            for parcel, one in zip(parcels[start:stop], pending[start:stop], strict=True):
                self._coming[each.tag].add(parcel.piece.nbytes, one)


class _Coming:
    """A message on its way here, in pieces that follow each other.

    Args:
        buffer: where it is put aside; None: it goes where it belongs.
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
