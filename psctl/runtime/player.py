"""Plays a schedule on a torch tensor: a thread for each peer and lane and direction, each waiting only for its own.

The script (`runtime/script.py`) says what waits for what; here it is waited for. A thread that sends waits until its
chunks are written, one that receives until the place is free. What is reduced is put aside first, in one of two buffers
by turns, so that the next message travels while this one still waits for its turn; whoever brings the last operand of a
write does the sum. Sums are made in place, buffers are made once and used again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from psctl.errors import JobFailed
from psctl.runtime.channel import Channel
from psctl.runtime.script import In, Out, Script, Write, script
from psctl.schedule.transfer import Schedule

Reduce = Callable[[torch.Tensor, torch.Tensor], object]
"""`reduce(a, b)` makes a the reduction of a and b, in this order."""

DEPTH = 2
"""Messages of one lane that may be put aside at once."""


def add(a: torch.Tensor, b: torch.Tensor) -> object:
    """The sum, in place."""
    return a.add_(b)


class Player:
    """Plays one schedule again and again, on vectors of any length and type of the CPU.

    Args:
        schedule: what is played; every rank must play the same.
        rank: which node of it this process is.
        channel: moves the bytes.
        reduce: what reductions do.
    """

    def __init__(self, schedule: Schedule, rank: int, channel: Channel, reduce: Reduce = add) -> None:
        self.schedule, self.rank = schedule, rank
        self._script: Script = script(schedule, rank)
        self._channel, self._reduce = channel, reduce
        self._changed = threading.Condition()
        self._round = 0
        self._closed = False
        self._error: BaseException | None = None
        self._busy = 0
        self._vector = torch.empty(0)
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._written = bytearray(len(self._script.writes))
        self._left = bytearray(sum(map(len, self._script.out.values())))
        self._aside: list[dict[int, torch.Tensor]] = [{} for _ in self._script.writes]
        self._buffers: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._threads: list[threading.Thread] = []

    def play(self, vector: torch.Tensor) -> None:
        """Play the schedule on a vector, in place.

        Args:
            vector: contiguous, one-dimensional, on the CPU; as long and of the same type on every rank.

        Raises:
            JobFailed: a peer is gone.
        """
        self._ready(vector)
        with self._changed:
            self._busy = len(self._threads)
            self._round += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._busy == 0 or self._error is not None)
            if self._error is not None:
                raise JobFailed(
                    f"rank {self.rank} lost a peer while gradients were summed: {self._error}",
                    "the rank that ended first is named by psctl status",
                ) from self._error

    def close(self) -> None:
        """End the threads; those that wait for a peer end with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    # ---- before a round ----

    def _ready(self, vector: torch.Tensor) -> None:
        assert vector.dim() == 1, "a vector"
        assert vector.is_contiguous(), "contiguous"
        if vector.numel() != self._vector.numel() or vector.dtype != self._vector.dtype:
            self._ranges = self.schedule.ranges(vector.numel())
            self._buffers = {lane: self._make(messages, vector) for lane, messages in self._script.into.items()}
        self._vector = vector
        self._written[:] = bytes(len(self._written))
        self._left[:] = bytes(len(self._left))
        if not self._threads:
            self._start()

    def _make(self, messages: Sequence[In], vector: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self._size(each.message.chunks) for each in messages if each.staged]
        return [vector.new_empty(max(sizes)) for _ in range(min(DEPTH, len(sizes)))]

    def _size(self, chunks: Sequence[int]) -> int:
        return sum(self._ranges[chunk][1] - self._ranges[chunk][0] for chunk in chunks)

    def _start(self) -> None:
        works: list[Callable[[], None]] = [
            *(lambda lane=lane, m=messages: self._send_all(lane, m) for lane, messages in self._script.out.items()),
            *(lambda lane=lane, m=messages: self._receive_all(lane, m) for lane, messages in self._script.into.items()),
        ]
        self._threads = [threading.Thread(target=self._loop, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    # ---- the threads ----

    def _loop(self, work: Callable[[], None]) -> None:
        seen = 0
        while True:
            with self._changed:
                while self._round == seen and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                seen = self._round
            try:
                work()
            except BaseException as error:  # noqa: BLE001  told by the thread that plays
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._busy -= 1
                if self._busy == 0:
                    self._changed.notify_all()

    def _send_all(self, lane: tuple[int, int], messages: Sequence[Out]) -> None:
        for each in messages:
            self._await(each.needs, ())
            for start, stop in self._pieces(each.message.chunks):
                self._channel.send(self._vector[start:stop], lane[0], each.tag)
            self._mark(self._left, each.index)

    def _receive_all(self, lane: tuple[int, int], messages: Sequence[In]) -> None:
        turns = itertools.cycle(self._buffers[lane])
        held: list[tuple[int, ...]] = []
        for each in messages:
            if not each.staged:
                self._receive_in_place(lane[0], each)
                continue
            if len(held) == DEPTH:
                self._await(held.pop(0), ())  # the buffer whose turn it is was used up
            self._receive_aside(lane[0], each, next(turns))
            held.append(each.writes)

    def _receive_in_place(self, peer: int, each: In) -> None:
        for index in each.writes:
            self._await_free(self._script.writes[index])
        for start, stop in self._pieces(each.message.chunks):
            self._channel.receive(self._vector[start:stop], peer, each.tag)
        for index in each.writes:
            self._mark(self._written, index)

    def _receive_aside(self, peer: int, each: In, buffer: torch.Tensor) -> None:
        at, parts = 0, []
        for chunk in each.message.chunks:
            size = self._size((chunk,))
            parts.append(buffer[at : at + size])
            at += size
        at = 0
        for start, stop in self._pieces(each.message.chunks):
            self._channel.receive(buffer[at : at + stop - start], peer, each.tag)
            at += stop - start
        for write in self._arrived(peer, each.writes, parts):
            self._await_free(write)
            self._apply(write, self._aside[write.index])
            self._aside[write.index] = {}
            self._mark(self._written, write.index)

    def _arrived(self, peer: int, writes: Sequence[int], parts: Sequence[torch.Tensor]) -> list[Write]:
        """Note operands; return the writes of which they were the last."""
        complete = []
        with self._changed:
            for index, part in zip(writes, parts, strict=True):
                write = self._script.writes[index]
                self._aside[index][peer] = part
                if len(self._aside[index]) == len(write.sources):
                    complete.append(write)
        return complete

    def _apply(self, write: Write, aside: dict[int, torch.Tensor]) -> None:
        start, stop = self._ranges[write.chunk]
        place = self._vector[start:stop]
        operands = [(source, aside[source]) for source in write.sources]
        if write.own:
            operands = sorted([*operands, (self.rank, place)], key=lambda each: each[0])
        if len(operands) == 2 and write.own:
            self._reduce(place, next(part for source, part in operands if source != self.rank))
            return
        total = operands[0][1]
        for _, operand in operands[1:]:
            self._reduce(total, operand)
        if total is not place:
            place.copy_(total)

    # ---- waiting ----

    def _pieces(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the ranges of elements of some chunks, neighbours joined, empty ones left out."""
        found: list[tuple[int, int]] = []
        for chunk in chunks:
            start, stop = self._ranges[chunk]
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            elif start < stop:
                found.append((start, stop))
        return [piece for piece in found if piece[0] < piece[1]]

    def _await_free(self, write: Write) -> None:
        self._await(() if write.before < 0 else (write.before,), write.readers)

    def _await(self, writes: Sequence[int], readers: Sequence[int]) -> None:
        def there() -> bool:
            return all(self._written[index] for index in writes) and all(self._left[index] for index in readers)

        if there():  # without the lock: a mark is set once a round and never taken back
            return
        with self._changed:
            self._changed.wait_for(lambda: there() or self._error is not None or self._closed)
            if not there():
                raise RuntimeError("another peer was lost") from self._error

    def _mark(self, marks: bytearray, index: int) -> None:
        with self._changed:
            marks[index] = 1
            self._changed.notify_all()


class Queue:
    """Plays vectors one after another on a thread of its own, so that backward goes on meanwhile.

    Args:
        play: sums a vector in place over all ranks.
    """

    def __init__(self, play: Callable[[torch.Tensor], None]) -> None:
        self._play = play
        self._changed = threading.Condition()
        self._vectors: list[torch.Tensor] = []
        self._asked = self._done = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="psctl-collective")
        self._thread.start()

    def put(self, vector: torch.Tensor) -> Ticket:
        """Have a vector summed; in the same order on every rank."""
        with self._changed:
            self._vectors.append(vector)
            self._asked += 1
            self._changed.notify_all()
            return Ticket(self, self._asked)

    def wait(self, number: int) -> None:
        """Return when the vector of that number is summed.

        Raises:
            JobFailed: a peer was lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread; what was put and not waited for is not played."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._vectors) or self._closed)
                if self._closed:
                    return
                vector = self._vectors.pop(0)
            try:
                self._play(vector)
            except BaseException as error:  # noqa: BLE001  raised by who waits
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class Ticket:
    """A vector that is on its way.

    Args:
        queue: who sums it.
        number: its place in the queue, from 1.
    """

    def __init__(self, queue: Queue, number: int) -> None:
        self._queue, self._number = queue, number

    def wait(self) -> None:
        """Return when it is summed."""
        self._queue.wait(self._number)
