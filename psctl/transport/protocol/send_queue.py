"""Frames that wait to be written: urgent before bulk, otherwise in order, never more than the receiver can hold.

Credits. The receiver announces a window: bytes that its socket's buffer holds even if no thread reads. Every frame of
the application takes its size (and COST) from it; the receiver gives credit for what it has read, an eighth of the
window at a time. So the bytes in flight always fit the receiver's kernel, which acknowledges them even while the
process makes no progress, and TCP's own timeout means that the other machine is gone.
No frame is larger than half a window: a longer message is sent in pieces, and an urgent one of a single frame is sent
before the next piece, however long the message in pieces is. So no large payload delays a heartbeat by more than the
pieces that the window holds. Messages that are not urgent stay in order.
Frames of the connection itself cost nothing (they are few: one Credit for each eighth of a window that was read). Hence
two ends that both wait for credit at a frame's boundary can still send each other credit: no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from psctl.errors import ProtocolError
from psctl.permits import WireMessage
from psctl.transport.protocol.connection_messages import Bye, Credit, Long
from psctl.transport.protocol.frames import (
    CONTROL,
    COST,
    FIRST,
    FRAME_HEADER,
    MAX_HEADER,
    MAX_PAYLOAD,
    MAX_PIECE,
    MESSAGE,
    PIECE,
    PREFIX,
    TAG,
    WHOLE,
    Bytes,
    frame_size,
)

BATCH = 64 << 10
"""Small frames are written together up to about this many bytes."""
STEP = MAX_PIECE
"""Bytes of payload in one frame, at most, and no more than a quarter of the window, so that some are in flight while
one is read. Each costs a wake-up at both ends, and the interpreter's own bytes have left the cache after so many of
others: larger ones cost less."""
SMALLEST_WINDOW = 16 << 10
NOTHING = memoryview(b"")

_encode = msgspec.msgpack.Encoder().encode


class Frame(msgspec.Struct, frozen=True):
    """One frame to be sealed. `message` is set on the last frame of a message, with its size as a whole."""

    kind: int
    header: Bytes
    payload: memoryview
    size: int
    """Bytes on the wire."""
    cost: int
    """What it takes of the receiver's window."""
    message: WireMessage | None = None
    bytes: int = 0


def framed(kind: int, header: Bytes, payload: memoryview, message: WireMessage | None = None, size: int = 0) -> Frame:
    """Return a frame; the last one of a message has it, and its size."""
    own = frame_size(len(header), len(payload))
    return Frame(kind, header, payload, own, 0 if kind == CONTROL else own + COST, message, size)


def control(message: Credit | Bye | Long) -> Frame:
    """Return a message of the connection as a frame."""
    return framed(CONTROL, _encode(message), NOTHING)


class SendQueue:
    """The frames of one connection that are not written yet.

    Args:
        window: of the other end, from its KeyExchange.
    """

    def __init__(self, window: int) -> None:
        assert window >= SMALLEST_WINDOW, "a window this small is refused at the handshake"
        self._window = self._credit = window
        self._frame = window // 2 - COST - PREFIX.size - 2 * TAG
        self._step = min(STEP, window // 4)
        self._queues: tuple[deque[Frame], deque[Frame]] = (deque(), deque())
        self._middle: deque[Frame] | None = None
        self._owed = 0
        self.pending = 0

    def add(self, message: WireMessage, header: bytes, payload: memoryview, *, urgent: bool) -> None:
        """Queue one message.

        Raises:
            ValueError: header or payload is larger than a message may have; the caller's fault.
        """
        head, body = len(header), len(payload)
        if body > MAX_PAYLOAD or head > MAX_HEADER:
            raise ValueError(
                f"{type(message).__name__}: {head} bytes of header (limit {MAX_HEADER}) and {body} of"
                f" payload (limit {MAX_PAYLOAD}) are too many for one message"
            )
        queue = self._queues[0 if urgent else 1]
        if head <= FRAME_HEADER and body <= self._step and head + body <= self._frame:
            size = frame_size(head, body)
            queue.append(Frame(MESSAGE, header, payload, size, size + COST, message, size))
            self.pending += size
        else:
            for frame in self._pieces(message, header, payload):
                queue.append(frame)
                self.pending += frame.size

    def _pieces(self, message: WireMessage, header: bytes, payload: memoryview) -> Iterator[Frame]:
        step, begun = self._step, min(self._step, self._frame - WHOLE.size - len(header))
        if len(header) + WHOLE.size <= FRAME_HEADER and 0 < begun < len(payload):
            first = framed(FIRST, WHOLE.pack(len(payload)) + header, payload[:begun])
            pieces = [payload[start : start + step] for start in range(begun, len(payload), step)]
        else:
            first = control(Long(len(header), len(payload)))
            parts = (memoryview(header), payload)
            pieces = [part[start : start + step] for part in parts for start in range(0, len(part), step)]
        yield first
        total = first.size + sum(frame_size(0, len(piece)) for piece in pieces)
        for piece in pieces[:-1]:
            yield framed(PIECE, b"", piece)
        yield framed(PIECE, b"", pieces[-1], message, total)

    def add_credit(self, count: int) -> None:
        """Note that the receiver has read `count` bytes.

        Raises:
            ProtocolError: that is more than was in flight.
        """
        self._credit += count
        if count <= 0 or self._credit > self._window:
            raise ProtocolError(f"it gave credit for {count} bytes, more than it can have read")

    def owe_credit(self, count: int) -> None:
        """Give the other end credit for `count` bytes before anything else is sent."""
        self._owed += count

    def is_ready(self) -> bool:
        """Return whether anything may be written now."""
        if self._owed:
            return True
        return self.pending > 0 and self._next()[0].cost <= self._credit

    def _next(self) -> deque[Frame]:
        urgent, bulk = self._queues
        if not self._middle:
            return urgent or bulk
        # The pieces of a message stay in order; an urgent message of one frame may be sent between them.
        return urgent if urgent and urgent[0].kind == MESSAGE else self._middle

    def take(self) -> list[Frame]:
        """Return the frames to write now, together; empty when nothing is ready."""
        frames, size = [], 0
        if self._owed:
            frames.append(control(Credit(self._owed)))
            self._owed = 0
        while size < BATCH and self.pending:
            queue = self._next()
            frame = queue[0]
            if frame.cost > self._credit:
                break
            queue.popleft()
            if frame.message is None:
                self._middle = queue
            elif queue is self._middle and frame.kind != MESSAGE:
                self._middle = None
            self._credit -= frame.cost
            self.pending -= frame.size
            size += frame.size
            frames.append(frame)
        return frames

    def clear(self) -> None:
        """Drop all that is queued."""
        for queue in self._queues:
            queue.clear()
        self._middle, self._owed, self.pending = None, 0, 0
