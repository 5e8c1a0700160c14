"""The outgoing messages of one connection: any thread queues them, one thread at a time seals and writes them.

The thread that is `_busy` seals a batch and passes it to the stream, for the order of seals is the order of bytes. A
short message with nothing queued before it is written by the thread that sends it, without blocking: for some KiB this
costs less than waking another thread. Longer messages, messages behind others, and bytes that the stream does not take
at once are written by the writer thread. A handler that answers on the connection's own reader thread is *corked*: its
answers wait until the reader has no more to read, and are written together.
The lock is never held while anything blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from psctl.permits import WireMessage
from psctl.transport.protocol.connection_messages import Bye
from psctl.transport.protocol.frames import DIRECT, PREFIX, Bytes
from psctl.transport.protocol.send_queue import BATCH, Frame, SendQueue, control
from psctl.transport.stream import Stream

GOODBYE = 0.1
"""Seconds that Bye waits for a batch that is being written."""
ACKNOWLEDGED = 0.001
"""Seconds between two looks at what the peer's system has acknowledged."""
SHORT = 32 << 10
"""Bytes that the sending thread writes itself, at most."""

Batch = tuple[list[Frame], memoryview | None]
"""Frames, and the rest of their sealed bytes when another thread has written the first."""


class OutgoingQueue:
    """The queue, the writer thread, and the sealing of one connection.

    Args:
        stream: takes the bytes.
        seal: writes the next frame into the start of a buffer; returns its size.
        window: bytes that the other end can hold unread.
        name: of the writer thread.
        sealed: frames are encrypted; else long payloads are sent from where they are.
    """

    on_written: Callable[[WireMessage, int], None] | None = None

    def __init__(
        self, stream: Stream, seal: Callable[[Frame, memoryview], int], window: int, name: str, *, sealed: bool = True
    ) -> None:
        self.bytes = 0
        """Bytes written so far."""
        self.error: Exception | None = None
        """The error that ended the writing; None while there is none."""
        self._stream, self._seal, self._encrypts = stream, seal, sealed
        self._lock = threading.Lock()
        self._work = threading.Condition(
            self._lock
        )  # for the writer: something may be written, or the queue is stopped
        self._drained = threading.Condition(
            self._lock
        )  # nothing is queued, or no thread writes, or the queue is stopped
        self._queue = SendQueue(window)
        self._busy = False
        self._rest: Batch | None = None
        self._over = False
        self._corked: int | None = None
        self._waiting = 0  # threads that wait for `_drained`
        self._sealed = memoryview(bytearray(SHORT))
        self._writer = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        """Start the writer thread."""
        self._writer.start()

    # ---- for any thread ----------------------------------------------------------------------------------------------

    def add(self, message: WireMessage, header: bytes, payload: memoryview, *, urgent: bool) -> bool:
        """Queue a message, or write it; False when the queue is stopped.

        Raises:
            ValueError: it is too large; the caller's fault.
        """
        with self._lock:
            if self._over:
                return False
            outbox = self._queue
            outbox.add(message, header, payload, urgent=urgent)
            if self._corked == threading.get_ident() and outbox.pending < BATCH:
                return True
            batch = self._start_batch()
        if batch:
            self._pump(batch)
        return True

    def cork(self, thread: int | None) -> None:
        """Hold back the messages of this thread; None: write them and hold back no more."""
        if thread is not None:
            self._corked = thread
            return
        self._corked = None
        if not self._queue.pending:  # a thread that adds something later writes it
            return
        with self._lock:
            batch = self._start_batch() if not self._over else []
        if batch:
            self._pump(batch)

    def send_credit(self, count: int) -> None:
        """Give the other end credit for `count` bytes."""
        with self._lock:
            self._queue.owe_credit(count)
            batch = self._start_batch()
        if batch:
            self._pump(batch)

    def add_credit(self, count: int) -> None:
        """Note that the other end has read `count` bytes.

        Raises:
            ProtocolError: so many were not sent.
        """
        with self._lock:
            self._queue.add_credit(count)
            if self._queue.pending:
                self._work.notify()

    def pending(self) -> int:
        """Return the bytes that are queued and not passed to the network yet."""
        with self._lock:
            return self._queue.pending

    def drained(self, timeout: float | None) -> int | None:
        """Wait until the peer's system holds all that was queued, at most `timeout` seconds.

        Returns:
            the bytes that it does not hold; None when the queue is stopped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            done = self._until(lambda: self._over or not (self._queue.pending or self._busy), timeout)
            while done and not self._over and self._stream.in_flight():
                done = deadline is None or time.monotonic() < deadline
                self._drained.wait(ACKNOWLEDGED)
            if self._over:
                return None
            return 0 if done else max(1, self._queue.pending + self._stream.in_flight())

    def _until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until nothing is queued, or no thread writes, or the queue is stopped. Under the lock."""
        self._waiting += 1
        try:
            return self._drained.wait_for(done, timeout)
        finally:
            self._waiting -= 1

    def stop(self) -> None:
        """Drop what is queued and take no more."""
        with self._lock:
            self._over = True
            self._queue.clear()
            self._work.notify_all()
            self._drained.notify_all()

    def send_bye(self, reason: str) -> None:
        """Send Bye if that is possible at once; to be called after `stop`."""
        with self._lock:
            if not self._until(lambda: not self._busy, GOODBYE):
                return
            self._busy = True  # for good
        with contextlib.suppress(OSError):  # the peer is gone, which the reader finds
            self._stream.send_now(self._seal_all([control(Bye(reason[:1000]))]))

    def join(self) -> None:
        """Wait for the writer's end."""
        self._writer.join()

    # ---- for the thread that writes ----

    def _start_batch(self) -> list[Frame]:
        """Return short frames for this thread to write; longer ones are left to the writer thread. Under the lock."""
        if self._busy:
            return []
        if self._queue.pending > SHORT:
            self._work.notify()
            return []
        batch = self._queue.take()
        self._busy = bool(batch)
        return batch

    def _pump(self, frames: list[Frame]) -> None:
        """Write a short batch without blocking; the writer thread writes the rest of it."""
        try:
            data = self._seal_all(frames)
            count = self._stream.send_now(data)
            self.bytes += count
            if count == len(data) and self.on_written is not None:
                self._written(frames)
        except Exception as error:  # noqa: BLE001  the reader reports it; a hook of the caller may raise
            self._fail(error)
            return
        with self._lock:
            if count < len(data):
                self._rest = frames, data[count:]
                self._work.notify()
                return
            self._busy = False
            if self._queue.is_ready():
                self._work.notify()
            if self._waiting:
                self._drained.notify_all()

    def _write(self) -> None:
        """Body of the writer thread."""
        try:
            while batch := self._next():
                frames, rest = batch
                if rest is None and not self._encrypts and any(len(frame.payload) >= DIRECT for frame in frames):
                    self.bytes += self._stream.send_parts(self._parts(frames))
                else:
                    data = self._seal_all(frames) if rest is None else rest
                    self._stream.send(data)
                    self.bytes += len(data)
                if self.on_written is not None:
                    self._written(frames)
                with self._lock:
                    self._busy = False
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    def _next(self) -> Batch | None:
        """Wait for frames to write together; None when the queue is stopped."""
        with self._lock:
            if self._waiting:
                self._drained.notify_all()
            while not self._over:
                if self._rest is not None:
                    found, self._rest = self._rest, None
                    return found
                if not self._busy and (frames := self._queue.take()):
                    self._busy = True
                    return frames, None
                self._work.wait()
        return None

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._stream.shutdown()

    def _seal_all(self, frames: Sequence[Frame]) -> memoryview:
        """Seal frames contiguously, so that one system call takes them all."""
        size = 0
        for frame in frames:
            size += frame.size
        if len(self._sealed) < size:
            self._sealed = memoryview(bytearray(size))
        out, end = self._sealed, 0
        for frame in frames:
            end += self._seal(frame, out[end:])
        return out[:end]

    def _parts(self, frames: Sequence[Frame]) -> list[Bytes]:
        """Return the bytes of open frames in order, long payloads where they are."""
        parts: list[Bytes] = []
        short = bytearray()
        for frame in frames:
            short += PREFIX.pack(frame.kind, len(frame.header), len(frame.payload))
            short += frame.header
            if len(frame.payload) < DIRECT:
                short += frame.payload
                continue
            parts += [short, frame.payload]
            short = bytearray()
        return [*parts, short] if short else parts

    def _written(self, frames: Sequence[Frame]) -> None:
        assert self.on_written is not None, "only called with a hook"
        for frame in frames:
            if frame.message is not None:
                self.on_written(frame.message, frame.bytes)
