"""One rank's part of a schedule: its sends, receives and writes, their order, and the waits between them.

The semantics are those of `schedule/transfer.py`. A *write* is the change that a step makes to one chunk at this rank:
a copy, or the reduction of all received values, in the order of the nodes' numbers with the rank's own value at its
number. In a step a rank sends a chunk's value before that step's write; so a write waits for the write before it, for
its incoming messages, and until the sends of the chunk up to that step are done. A send waits for the writes of all
earlier steps. There is no barrier between the steps of different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.schedule.schedule import Schedule, ScheduleMessage


class ChunkWrite(msgspec.Struct, frozen=True):
    """The change of one chunk in one step. `sources` are in rising order; `own`: this rank's value takes part."""

    index: int
    chunk: int
    sources: tuple[int, ...]
    reduces: bool
    own: bool
    before: int  # the write of this chunk before this one; -1: none
    readers: tuple[int, ...]  # messages out that must have left


class OutgoingMessage(msgspec.Struct, frozen=True):
    """A message that this rank sends."""

    index: int
    tag: int
    message: ScheduleMessage


class IncomingMessage(msgspec.Struct, frozen=True):
    """A message that this rank receives: into a staging buffer first if `staged`, else directly into the vector."""

    tag: int
    message: ScheduleMessage
    writes: tuple[int, ...]  # one per chunk
    staged: bool


class RankStep(msgspec.Struct, frozen=True):
    """One rank's messages and writes of one step; both ends have the messages in the same order."""

    out: tuple[OutgoingMessage, ...]
    into: tuple[IncomingMessage, ...]
    writes: tuple[ChunkWrite, ...]


class RankProgram(msgspec.Struct, frozen=True):
    """One rank's part of a schedule: the steps in which it has messages."""

    rank: int
    writes: tuple[ChunkWrite, ...]
    steps: tuple[RankStep, ...]


def make_program(schedule: Schedule, rank: int) -> RankProgram:
    """Return the part of `rank` in a schedule; it depends on the schedule only, so both ends agree on tags."""
    numbered = list(enumerate(schedule.messages()))
    mine = [(tag, m) for tag, m in numbered if rank in (m.source, m.destination)]
    draft = _Draft(rank, holds=rank < schedule.world)
    start = 0
    for at in range(1, len(mine) + 1):
        if at == len(mine) or mine[at][1].step != mine[start][1].step:
            draft.take(mine[start:at])
            start = at
    return draft.finish()


class _Draft:
    """A program in the making."""

    def __init__(self, rank: int, *, holds: bool) -> None:
        self._rank, self._holds = rank, holds
        self._writes: list[ChunkWrite] = []
        self._last: dict[int, int] = {}  # chunk -> its last write
        self._reading: dict[int, list[int]] = {}  # chunk -> messages out since its last write
        self._steps: list[RankStep] = []
        self._sent = 0

    def take(self, step: Sequence[tuple[int, ScheduleMessage]]) -> None:
        """Add all messages of one step: sends first, because they read the values before the writes."""
        out = [self._send(tag, message) for tag, message in step if message.source == self._rank]
        leaving = {chunk for each in out for chunk in each.message.chunks}
        coming = [(tag, message) for tag, message in step if message.destination == self._rank]
        made = self._write([message for _, message in coming])
        into = []
        for tag, message in coming:
            staged = message.action == "reduce" or any(chunk in leaving for chunk in message.chunks)
            into.append(IncomingMessage(tag, message, tuple(made[chunk] for chunk in message.chunks), staged))
        writes = tuple(self._writes[index] for index in made.values())
        self._steps.append(RankStep(tuple(out), tuple(into), writes))

    def finish(self) -> RankProgram:
        """Return the program."""
        return RankProgram(self._rank, tuple(self._writes), tuple(self._steps))

    def _send(self, tag: int, message: ScheduleMessage) -> OutgoingMessage:
        made = OutgoingMessage(self._sent, tag, message)
        for chunk in message.chunks:
            self._reading.setdefault(chunk, []).append(self._sent)
        self._sent += 1
        return made

    def _write(self, coming: Sequence[ScheduleMessage]) -> dict[int, int]:
        sources: dict[int, list[int]] = {}
        reduces: dict[int, bool] = {}
        for message in coming:
            for chunk in message.chunks:
                sources.setdefault(chunk, []).append(message.source)
                reduces[chunk] = message.action == "reduce"
        made = {}
        for chunk, found in sources.items():
            before = self._last.get(chunk, -1)
            own = reduces[chunk] and (self._holds or before >= 0)
            index = made[chunk] = len(self._writes)
            readers = tuple(self._reading.pop(chunk, ()))
            self._writes.append(ChunkWrite(index, chunk, tuple(sorted(found)), reduces[chunk], own, before, readers))
            self._last[chunk] = index
        return made
