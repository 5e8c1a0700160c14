"""Plays a schedule with a thread for each peer, lane and direction, each waiting only for its own: for long vectors.

The script (`runtime/script.py`) says what waits for what; here it is waited for, and for nothing else: so a transfer
starts as soon as it can, as the prediction has it. A thread that sends waits until its chunks are written, one that
receives until the place is free. What is reduced is put aside first, in one of a few buffers by turns, so that the next
messages travel while this one is summed; whoever brings the last operand of a write does it. Sums are made in place,
buffers are made once and used again.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from psctl.runtime.channel import Channel, Parcel, Pending
from psctl.runtime.chunks import Chunks
from psctl.runtime.script import In, Out, Script, Write

DEPTH = 3
"""Messages of one lane that may be put aside at once: one is summed, one arrives, one is expected."""

Lane = tuple[int, int]


class Laned:
    """Plays one rank's script.

    Args:
        script: what is played.
        channel: moves the bytes.
    """

    def __init__(self, script: Script, channel: Channel) -> None:
        self._script, self._channel = script, channel
        self._writes = len(script.writes)  # marks: writes first, then messages that have left
        self._marks = Marks(self._writes + sum(map(len, script.out.values())))
        self._arriving = threading.Lock()
        self._aside: list[dict[int, torch.Tensor]] = [{} for _ in script.writes]
        self._buffers: dict[Lane, list[torch.Tensor]] = {}
        self._vector = torch.empty(0)
        self._chunks: Chunks
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        works: list[Callable[[], None]] = [
            *(lambda lane=lane, m=each: self._send_all(lane, m) for lane, each in script.out.items()),
            *(lambda lane=lane, m=each: self._receive_all(lane, m) for lane, each in script.into.items()),
        ]
        self._starts: list[queue.SimpleQueue[bool]] = [queue.SimpleQueue() for _ in works]
        self._threads = [
            threading.Thread(target=self._loop, args=(start, work), daemon=True, name="psctl-lane")
            for start, work in zip(self._starts, works, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def play(self, vector: torch.Tensor, chunks: Chunks) -> None:
        """Play it on a vector that is cut so; raises what the first thread that failed has raised, at once."""
        self._vector, self._chunks = vector, chunks
        self._marks.clear()
        for start in self._starts:
            start.put(True)
        for _ in self._starts:
            error = self._ended.get()
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads. Those of a round that failed end when the channel was aborted."""
        self._marks.give_up()
        for start in self._starts:
            start.put(False)
        for thread in self._threads:
            thread.join(10.0)

    # ---- the threads ----

    def _loop(self, start: queue.SimpleQueue[bool], work: Callable[[], None]) -> None:
        while start.get():
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised by the thread that plays
                self._marks.give_up()
                self._ended.put(error)
            else:
                self._ended.put(None)

    def _send_all(self, lane: Lane, messages: Sequence[Out]) -> None:
        """Send in order; the next may follow before one has left."""
        leaving: deque[tuple[Out, list[Pending]]] = deque()
        for each in messages:
            while leaving and not self._marks.all(each.needs):
                self._has_left(*leaving.popleft())
            self._marks.wait(each.needs)
            pieces = self._chunks.places(self._vector, each.message.chunks)
            leaving.append((each, self._channel.post([Parcel(piece, lane[0], each.tag) for piece in pieces], ())))
            if len(leaving) == DEPTH:
                self._has_left(*leaving.popleft())
        for one in leaving:
            self._has_left(*one)

    def _has_left(self, each: Out, pending: Sequence[Pending]) -> None:
        for one in pending:
            one.wait()
        self._marks.set(self._writes + each.index)

    def _receive_all(self, lane: Lane, messages: Sequence[In]) -> None:
        """Receive in order; the next are expected while one arrives, where there is room for them."""
        rooms = self._rooms(lane, messages)
        expected: deque[tuple[In, torch.Tensor | None, list[Pending]]] = deque()
        after = 0
        for _ in messages:
            while after < len(messages) and len(expected) < DEPTH:
                needs, buffer = rooms[after]
                if expected and not self._marks.all(needs):
                    break
                self._marks.wait(needs)
                expected.append(self._expect(lane[0], messages[after], buffer))
                after += 1
            self._arrived(lane[0], *expected.popleft())

    def _rooms(self, lane: Lane, messages: Sequence[In]) -> list[tuple[list[int], torch.Tensor | None]]:
        """Return for each message what its place waits for, and the buffer that it is put aside in."""
        staged = [each for each in messages if each.staged]
        size = max((self._chunks.size(each.message.chunks) for each in staged), default=0)
        buffers = self._lane_buffers(lane, size, min(DEPTH, len(staged)))
        found: list[tuple[list[int], torch.Tensor | None]] = []
        count = 0
        for each in messages:
            if not each.staged:
                found.append(([mark for index in each.writes for mark in self._before(index)], None))
                continue
            used = staged[count - DEPTH].writes if count >= DEPTH else ()
            found.append((list(used), buffers[count % DEPTH]))
            count += 1
        return found

    def _lane_buffers(self, lane: Lane, size: int, count: int) -> list[torch.Tensor]:
        width = size * self._vector.element_size()
        held = self._buffers.get(lane, [])
        if len(held) < count or (held and held[0].numel() < width):
            held = self._buffers[lane] = [torch.empty(width, dtype=torch.uint8) for _ in range(count)]
        return [each[:width].view(self._vector.dtype) for each in held]

    def _expect(
        self, peer: int, each: In, buffer: torch.Tensor | None
    ) -> tuple[In, torch.Tensor | None, list[Pending]]:
        chunks = each.message.chunks
        pieces = self._chunks.places(self._vector, chunks) if buffer is None else self._chunks.aside(buffer, chunks)
        return each, buffer, self._channel.post((), [Parcel(piece, peer, each.tag) for piece in pieces])

    def _arrived(self, peer: int, each: In, buffer: torch.Tensor | None, pending: Sequence[Pending]) -> None:
        for one in pending:
            one.wait()
        if buffer is None:
            for index in each.writes:
                self._marks.set(index)
            return
        parts = self._chunks.parts(buffer, each.message.chunks)
        for write in self._complete(peer, each.writes, parts):
            self._marks.wait(self._before(write.index))
            self._chunks.write(write, self._script.rank, self._vector, self._aside[write.index])
            self._aside[write.index] = {}
            self._marks.set(write.index)

    def _complete(self, peer: int, writes: Sequence[int], parts: Sequence[torch.Tensor]) -> list[Write]:
        """Note operands; return the writes of which they were the last."""
        found = []
        with self._arriving:
            for index, part in zip(writes, parts, strict=True):
                self._aside[index][peer] = part
                if len(self._aside[index]) == len(self._script.writes[index].sources):
                    found.append(self._script.writes[index])
        return found

    def _before(self, index: int) -> list[int]:
        """Return the marks that a write waits for: the write before it, and what read the chunk."""
        write = self._script.writes[index]
        left = [self._writes + reader for reader in write.readers]
        return left if write.before < 0 else [write.before, *left]


class Marks:
    """What is done in this round. Each thread is woken by the mark that it waits for, and by no other.

    Args:
        count: marks are numbered from 0.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._set = bytearray(count)
        self._waiting: dict[int, list[threading.Lock]] = {}
        self._given_up = False

    def clear(self) -> None:
        """Begin a round; nobody waits."""
        self._set[:] = bytes(len(self._set))

    def all(self, marks: Iterable[int]) -> bool:
        """Return whether all these are set; a mark that was set stays so for the round."""
        return all(self._set[mark] for mark in marks)

    def set(self, mark: int) -> None:
        """Set a mark and wake who waits for it."""
        with self._lock:
            self._set[mark] = 1
            for waiter in self._waiting.pop(mark, ()):
                waiter.release()

    def wait(self, marks: Iterable[int]) -> None:
        """Return when all these are set.

        Raises:
            RuntimeError: another thread gave up.
        """
        for mark in marks:
            if self._set[mark]:
                continue
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                if self._set[mark]:
                    continue
                if not self._given_up:
                    self._waiting.setdefault(mark, []).append(waiter)
            if not self._given_up:
                waiter.acquire()
            if self._given_up:
                raise RuntimeError("another lane failed")

    def give_up(self) -> None:
        """Wake everyone for good."""
        with self._lock:
            self._given_up = True
            waiting = [waiter for each in self._waiting.values() for waiter in each]
            self._waiting.clear()
        for waiter in waiting:
            waiter.release()
