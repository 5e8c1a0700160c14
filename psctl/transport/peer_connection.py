"""A connection between two processes of a job: one thread reads it, one writes, any thread queues messages.

The reader thread owns everything that arrives: it receives bytes, calls the handler, and is the only thread that ends
the connection; `on_connection_lost` is its last call. A thread that waits for a message may read in its place for a
while (ReadLease) and leaves it to the reader thread to end the connection. `outgoing_queue.py` writes. Whatever ends
the connection (close, a fault, an error of a write) shuts the stream down, which wakes both threads; the reader then
joins the writer, closes the socket and calls the handler.

Where messages have permits (permits.py), a message that the other end may not send ends the connection: before memory
is taken for its payload, and before the handler is called.

Read leases. A message that a thread waits for costs two thread switches when the reader thread receives it: the kernel
wakes the reader, the reader wakes the waiting thread, and that one must also get the interpreter lock. So a waiting
thread reads the connection directly where it can (leader and followers: Schmidt et al., Pattern-oriented software
architecture, vol. 2). A thread that sleeps in a system call cannot be interrupted for less than would be saved, so the
reader thread gives up the lease unasked: when what it received ended a wait, another wait will likely follow soon. It
*rests*, and the next waiting thread finds the lease free. Every REST seconds the reader thread looks, and reads again
when no thread has taken the lease since its last look. So a connection is unread for 2 REST at most while no thread
waits, which credits, keepalive and senders do not notice. `recall` ends the rest at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from psctl.errors import ConnectionFailed, PeerLeft, PeerLost, ProtocolError, TimedOut
from psctl.permits import SenderPermits, WireMessage
from psctl.transport.credentials import Credentials
from psctl.transport.outgoing_queue import OutgoingQueue
from psctl.transport.protocol.connection import ConnectionProtocol, Credited, Ended, Event, Joined, Left, Named
from psctl.transport.protocol.frames import Bytes
from psctl.transport.protocol.message_assembly import Codec, Received
from psctl.transport.stream import Stream, describe_error
from psctl.types import Member

NOTHING = memoryview(b"")
REST = 0.005
"""Seconds between two looks of a reader thread that rests."""
CREDIT = 8
"""Credit is given back for each so many-th part of the window. Given at a half, four workers and four servers with both
directions busy (100 MB, 200 Mbit/s) took 1.21 times what the wire needs, and 1.12 at an eighth."""
SHORT = 16 << 10
"""Bytes up to which what came counts as short (`PeerConnection.offer_lease`)."""
PAUSE = 0.003
"""Seconds between two credits before half of the window is owed. On a fast link an eighth is read in less, and the
sender would be woken four times as often for nothing."""


M = TypeVar("M", bound=WireMessage, contravariant=True)


class ConnectionHandler(Protocol[M]):
    """Receives the messages, of the kinds M, and the events of connections.

    All methods are called on the connection's reader thread, `receive_buffer_for` and `on_message` also on a thread
    that holds the read lease. An exception ends the connection.
    """

    def on_connected(self, peer: PeerConnection) -> None:
        """Handle a new connection; called first."""
        return

    def receive_buffer_for(self, peer: PeerConnection, message: M, size: int) -> memoryview | None:
        """Return a writable view of `size` bytes for the payload of `message`; None: the connection allocates one."""
        return None

    def on_message(self, peer: PeerConnection, message: M, payload: memoryview | None) -> None:
        """Handle a message that has arrived whole. A payload in a buffer of the connection may not be retained."""

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Handle the end of the connection: called exactly once, last, also after `close`."""


AnyHandler: TypeAlias = ConnectionHandler[Any]
"""A handler of one connection. Any: the kinds that the connection's codec decodes are data, not a type."""


class ReadLease:
    """The right to read one connection: one thread holds it, or it is free."""

    def __init__(self) -> None:
        self.offered = False
        """The reader thread rests once it has delivered what arrived. Set by the thread that holds the lease."""
        self._reading = threading.Lock()
        self._called = threading.Event()
        self._taken = 0  # how often a waiting thread took it
        self._resting = False

    def try_acquire(self) -> bool:
        """Take the lease if it is free; for a waiting thread."""
        if not self._reading.acquire(blocking=False):
            return False
        self._taken += 1
        return True

    def release(self) -> None:
        """Release the lease that `try_acquire` took."""
        self._reading.release()

    def recall(self) -> None:
        """End the reader thread's rest."""
        if self._resting or self.offered:
            self._called.set()

    # ---- the reader thread -----------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the lease, wherever it is; the reader thread releases it only to rest."""
        self._reading.acquire()

    def rest(self) -> None:
        """Leave the lease to waiting threads for as long as they take it; return with the lease."""
        self._resting = True
        self.offered = False
        seen = self._taken
        self._reading.release()
        while not self._called.wait(REST):
            if self._reading.acquire(blocking=False):
                if self._taken == seen:
                    break
                seen = self._taken
                self._reading.release()
        else:
            self._reading.acquire()
        self._resting = False
        self._called.clear()


class PeerConnection:
    """One end of a connection to another process of the job. Made by `dial` and `Acceptor`."""

    member: Member

    def __init__(
        self, stream: Stream, credentials: Credentials, codec: Codec, handler: AnyHandler, *, accepting: bool,
        sealed: bool = True,
    ) -> None:  # fmt: skip
        self.name = stream.name
        self.bytes_received = 0
        self._stream, self._codec, self._handler = stream, codec, handler
        self._role = credentials.member.role
        self._permits: SenderPermits | None = None  # of the other end; None: its messages need none
        self._connection = ConnectionProtocol(
            credentials.accepting if accepting else credentials.dialling,
            accepting=accepting,
            job=credentials.job,
            me=credentials.member,
            codec=codec,
            window=stream.window,
            receive_buffer_for=self._receive_buffer_for,
            sealed=sealed,
        )
        self._sealed = sealed
        self._part, self._credited = max(1, stream.window // CREDIT), 0.0
        self._lock = threading.Lock()
        self._out: OutgoingQueue | None = None
        self._closing: str | None = None
        self._ended: ConnectionFailed | None = None
        self._reader: threading.Thread | None = None
        self.read_lease = ReadLease()  # a thread that takes it calls `read_here`
        self._last_count = 0  # bytes that were received last
        # What ended the reading on a thread that held the lease: the end of the connection, or an exception.
        self._over: ConnectionFailed | None = None
        self._fault: Exception | None = None

    def __repr__(self) -> str:
        return f"PeerConnection({self.name})"

    # ---- for any thread ----------------------------------------------------------------------------------------------

    def send(self, message: WireMessage, payload: Bytes | None = None, *, urgent: bool = False) -> bool:
        """Queue a message; never blocks on the network, may be called by any thread.

        Args:
            message: of a kind that both ends have agreed on.
            payload: any contiguous buffer of at most MAX_PAYLOAD bytes. It is not copied: leave it untouched until the
                receiver has acknowledged the message. An empty one arrives as None.
            urgent: overtake queued messages that are not urgent, at the boundary between messages.

        Returns:
            False when the connection is over and the message was dropped; `on_connection_lost` reports it.

        Raises:
            ValueError: the message is too large; the caller's fault.
        """
        assert self._out is not None, "the connection is made"
        view = NOTHING if payload is None else memoryview(payload).cast("B")
        return self._out.add(message, self._codec.encode(message), view, urgent=urgent)

    def withhold_credit(self, count: int) -> None:
        """Give no credit for `count` bytes of payload that the handler retains before they are wanted.

        So the peer stops when its window is full of them, which bounds their memory. Only from `on_message`, for its
        own payload.
        """
        with self._lock:
            self._connection.kept += count

    def release_credit(self, count: int) -> None:
        """Give credit for retained bytes; may be called by any thread."""
        with self._lock:
            self._connection.kept -= count
        self._give_credit()

    def tolerate(self, silence: float) -> None:
        """End the connection only after `silence` seconds without a packet of the peer, instead of 5."""
        self._stream.tolerate(silence)

    def silent_for(self) -> float:
        """Return the seconds since the last packet of the peer's system; a process that stands still is not silent."""
        return self._stream.silent_for()

    def offer_lease(self) -> None:
        """Let the reader thread rest after this message, so that the next waiting thread reads; only from `on_message`.

        After a long message it continues to read: more bytes may arrive while no thread waits.
        """
        self.read_lease.offered = self._last_count <= SHORT

    def read_here(self, over: Callable[[], bool], seconds: float) -> bool:
        """Read on this thread, which holds the read lease.

        Args:
            over: called after each receive; True ends the reading.
            seconds: of silence after which the reading ends.

        Returns:
            whether `over` returned True.
        """
        try:
            while self._over is None and self._fault is None and self._stream.arrives(seconds):
                self._receive(patient=False)
                self._over = self._deliver()
                if over():
                    return True
        except Exception as fault:  # noqa: BLE001  the reader thread ends the connection and reports it
            self._fault = fault
        except BaseException as fault:
            self._fault = InterruptedError(f"reading was interrupted by {type(fault).__name__}")
            raise
        finally:
            self.read_lease.release()
            if self._over is not None or self._fault is not None:
                self.read_lease.recall()
        return False

    @property
    def on_written(self) -> Callable[[WireMessage, int], None] | None:
        """Called with (message, bytes of its sealed frames) once the network has all of it, on a thread that sends."""
        return self._outgoing.on_written

    @on_written.setter
    def on_written(self, call: Callable[[WireMessage, int], None] | None) -> None:
        self._outgoing.on_written = call

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, all counted."""
        return self._out.bytes if self._out is not None else 0

    @property
    def _outgoing(self) -> OutgoingQueue:
        assert self._out is not None, "the connection is made"
        return self._out

    def pending(self) -> int:
        """Return the bytes that are queued and not passed to the network yet."""
        return self._out.pending() if self._out is not None else 0

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the peer's system holds all that was queued, so that the end of this process loses nothing of it.

        Raises:
            TimedOut: it took longer than `timeout` seconds; names the peer.
            ConnectionFailed: the connection ended first.
        """
        left = self._outgoing.drained(timeout)
        if self._ended is not None:
            raise self._ended
        if self._closing is not None:
            raise self._failure(f"closed: {self._closing}")
        if left:
            raise TimedOut(f"{self.name}: {left} bytes were not taken within {timeout:g} s", where=self.name)

    def close(self, reason: str = "") -> None:
        """End the connection: send Bye with `reason`, drop what is queued (see `flush`); `on_connection_lost` follows.

        May be called by any thread, also from the handler, and twice; does not wait for the threads.
        """
        with self._lock:
            if self._closing is not None or self._ended is not None:
                return
            self._closing = reason or "closed"
        self._goodbye(self._closing)
        self.read_lease.recall()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until `on_connection_lost` has returned and both threads have ended; False after `timeout` seconds."""
        if self._reader is not None:
            self._reader.join(timeout)
        return self._reader is None or not self._reader.is_alive()

    # ---- the handshake, on the thread that dialled or accepted -----------------------------------------------------

    def handshake(self, decide: Callable[[Member], str | None], patience: float) -> None:
        """Make the connection, or end it with a reason.

        Args:
            decide: returns why the member that the certificate names is refused; None: it is accepted.
            patience: seconds for the whole handshake.

        Raises:
            ProtocolError: the peer is no member, is refused, refuses this end, or breaks the protocol.
            PeerLost: it ended, or took too long.
        """
        deadline = time.monotonic() + patience
        try:
            joined = self._exchange_keys(decide, deadline)
            self._stream.limit(None)
            self._out = OutgoingQueue(
                self._stream, self._connection.seal, joined.window, f"psctl writer {self.member}", sealed=self._sealed
            )
        except ConnectionFailed as error:
            with contextlib.suppress(OSError):  # try to send the reason, or TLS's alert
                self._stream.limit(0.5)
                self._send_handshake()
            raise self._fail(type(error), error.message) from error
        except OSError as error:
            why = f"no handshake within {patience:g} s" if time.monotonic() >= deadline else describe_error(error)
            raise self._fail(PeerLost, why) from error
        except BaseException:
            self.abandon()
            raise

    def _exchange_keys(self, decide: Callable[[Member], str | None], deadline: float) -> Joined:
        while True:
            event = self._connection.next_event()
            self._send_handshake_until(deadline)
            match event:
                case None:
                    self._stream.limit(max(0.001, deadline - time.monotonic()))
                    self._receive()
                case Named(member):
                    self._decide(member, decide(member))
                case Joined():
                    return event
                case Ended():
                    raise PeerLost("it ended the connection during the handshake")
                case _:
                    raise AssertionError(f"{event} before the connection was made")

    def _decide(self, member: Member, against: str | None) -> None:
        self.member = member
        self.name = f"{member} at {self._stream.name}"
        if against is None:
            if self._codec.permits is not None:
                self._permits = SenderPermits(self._codec.permits, self._role, member)
            self._connection.accept()
            return
        self._connection.refuse(against)
        raise ProtocolError(f"refused: {against}")

    def _send_handshake_until(self, deadline: float) -> None:
        self._stream.limit(max(0.001, deadline - time.monotonic()))
        try:
            self._send_handshake()
        except ConnectionError:
            # The other end is gone. Why it refused this end may have been received before; reading finds it.
            self._connection.outgoing()

    def _send_handshake(self) -> None:
        if data := self._connection.outgoing():
            self._stream.send(memoryview(data))

    def _fail(self, kind: type[ConnectionFailed], reason: str) -> ConnectionFailed:
        self.abandon()
        return kind(f"{self.name}: {reason}", where=self.name)

    def abandon(self) -> None:
        """Close a connection that is not made, on the thread that makes it."""
        self._stream.shutdown()
        self._stream.close()
        self._connection.release()

    # ---- the reader thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads of a made connection."""
        self._reader = threading.Thread(target=self.run, name=f"psctl reader {self.member}", daemon=True)
        self._reader.start()

    def run(self) -> None:
        """Read until the end, as the reader thread."""
        self._reader = threading.current_thread()
        self._outgoing.start()
        try:
            self._handler.on_connected(self)
            error = self._read()
        except ProtocolError as fault:
            error = type(fault)(f"{self.name}: {fault.message}", where=self.name)
            self._goodbye(fault.message)
        except OSError as fault:
            error = self._failure(describe_error(fault, self._stream.silence))
        except Exception as fault:  # noqa: BLE001  a fault of the handler: reported, never swallowed
            error = self._failure(f"our handler failed: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._goodbye(error.message)
        self._end(error)

    def _read(self) -> ConnectionFailed:
        """Deliver what arrives; return why the connection ended."""
        self.read_lease.acquire()
        while True:
            if self._fault is not None:
                raise self._fault
            over = self._over or self._deliver()
            if over is not None:
                return over
            if self.read_lease.offered:
                self.read_lease.rest()
            else:
                self._receive()

    def _deliver(self) -> ConnectionFailed | None:
        """Deliver what has arrived; return why the connection ended, None while it has not."""
        connection, handler, out, permits = self._connection, self._handler, self._outgoing, self._permits
        me, corked = threading.get_ident(), False
        while True:
            event: Event | None = connection.next_event()
            if self._closing is not None:
                return self._failure(self._closing)
            if connection.unpaid >= self._part:
                self._give_credit()
            match event:
                case Received(message, payload):
                    if not corked:
                        out.cork(me)
                        corked = True
                    if permits is not None and type(message) not in permits.always:
                        permits.admit(message, checked=payload is not None)
                    handler.on_message(self, message, payload)
                case None:
                    if corked:
                        out.cork(None)
                    return None
                case Credited(count):
                    out.add_credit(count)
                case Left(reason):
                    return PeerLeft(f"{self.name} left: {reason}", where=self.name)
                case Ended():
                    return self._failure("connection reset")
                case _:
                    raise AssertionError(f"{event} in an open connection")

    def _receive_buffer_for(self, message: WireMessage, size: int) -> memoryview | None:
        permits = self._permits
        if permits is not None and size > permits.always.get(type(message), -1):
            permits.check(message, size)
        return self._handler.receive_buffer_for(self, message, size)

    def _give_credit(self) -> None:
        connection, now = self._connection, time.monotonic()
        with self._lock:
            due = connection.unpaid - connection.kept
            if due < self._part or (due < CREDIT // 2 * self._part and now < self._credited + PAUSE):
                return
            self._credited, owed = now, connection.owed()
        self._outgoing.send_credit(owed)

    def _receive(self, *, patient: bool = True) -> None:
        """Receive the bytes that are there; `patient`: sleep until they are enough for an event."""
        connection = self._connection
        space, least = connection.space()
        count = self._last_count = self._stream.receive_into(space, least if patient else 1)
        connection.add_received(count)
        self.bytes_received += count

    def _failure(self, why: str) -> ConnectionFailed:
        """Return the error that ended the connection; an error of the writer explains more than one of the reader."""
        if self._closing is not None:
            return ConnectionFailed(f"{self.name}: closed here: {self._closing}", where=self.name)
        fault = self._out.error if self._out is not None else None
        if fault is not None and not isinstance(fault, ConnectionError):
            if isinstance(fault, OSError):
                why = describe_error(fault, self._stream.silence)
            else:
                why = f"our writer failed: {type(fault).__name__}: {fault}"
        return PeerLost(f"{self.name}: {why}", where=self.name)

    def _end(self, error: ConnectionFailed) -> None:
        with self._lock:
            self._ended = error
        out = self._outgoing
        out.stop()
        self._stream.shutdown()
        out.join()
        self._stream.close()
        self._connection.release()
        self._handler.on_connection_lost(self, error)

    def _goodbye(self, reason: str) -> None:
        """Send Bye if that is possible at once, then end the stream."""
        if self._out is not None:
            self._out.stop()
            self._out.send_bye(reason)
        self._stream.shutdown()
