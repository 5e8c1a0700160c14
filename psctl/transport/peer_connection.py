"""A made connection at work: one thread reads, one writes, and whoever sends only queues.

Who does what. The reader thread owns all that arrives: it takes bytes in, calls the handler, and is the only one that
ends things: it alone calls `lost`, as its last act. Who waits for what comes may read in its place for a while
(read_lease.py), and leaves to it whatever ends the connection. What leaves is outgoing_queue.py's. Whatever ends the
connection
(close, a fault, an error of a write) shuts the stream down, which wakes both threads; the reader then joins the writer,
gives the socket back and tells the handler.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError, TimedOut
from psctl.transport.credentials import Credentials
from psctl.transport.outgoing_queue import OutgoingQueue
from psctl.transport.protocol.assembly import Received
from psctl.transport.protocol.connection import Codec, ConnectionProtocol, Credited, Ended, Event, Joined, Left, Named
from psctl.transport.protocol.sealing import Bytes
from psctl.transport.read_lease import ReadLease
from psctl.transport.stream import Stream, why_gone
from psctl.types import Member

NOTHING = memoryview(b"")
CREDIT = 8
"""Credit is given back for each so many-th part of the window. Given at a half, four workers and four servers with both
directions busy (100 MB, 200 Mbit/s) took 1.21 times what the wire needs, and 1.12 at an eighth."""
SHORT = 16 << 10
"""Bytes up to which what came counts as short (`PeerConnection.offer_turn`)."""
PAUSE = 0.003
"""Seconds between two words of credit before half of the window is owed. On a fast link an eighth is read in less, and
who sends would be woken four times as often for nothing."""


class ConnectionHandler(Protocol):
    """What a room does with its peers. All are called on the peer's reader thread, `place` and `received` also on one
    that reads in its place; what they raise ends that peer."""

    def on_connected(self, peer: PeerConnection) -> None:
        """The connection is made; before anything else."""

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Return where the payload of `message` goes: a writable view of `size` bytes; None: a buffer lent."""

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """A message has arrived, whole. A payload that was lent may not be kept."""

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """The connection is over: exactly once, last, also after our own close."""


class PeerConnection:
    """The process at the other end of a sealed connection. Made by `dial` and `Acceptor`."""

    member: Member

    def __init__(
        self, stream: Stream, credentials: Credentials, codec: Codec, handler: ConnectionHandler, *, accepting: bool
    ) -> None:
        self.name = stream.name
        self.bytes_received = 0
        self._stream, self._codec, self._handler = stream, codec, handler
        self._connection = ConnectionProtocol(
            credentials.accepting if accepting else credentials.dialling,
            accepting=accepting,
            job=credentials.job,
            me=credentials.member,
            codec=codec,
            window=stream.window,
            place=partial(handler.receive_buffer_for, self),
        )
        self._part, self._credited = max(1, stream.window // CREDIT), 0.0
        self._lock = threading.Lock()
        self._out: OutgoingQueue | None = None
        self._closing: str | None = None
        self._ended: ConnectionFailed | None = None
        self._reader: threading.Thread | None = None
        self.turn = ReadLease()  # to read; who takes it calls `read_here`
        self._came = 0  # bytes that were received last
        self._over: ConnectionFailed | None = None  # why nothing more arrives,
        self._fault: Exception | None = None  # or what was raised, as found by who read in the reader's place

    def __repr__(self) -> str:
        return f"Peer({self.name})"

    # ---- for everyone ----------------------------------------------------------------------------------------------

    def send(self, message: Any, payload: Bytes | None = None, *, urgent: bool = False) -> bool:
        """Queue a message; never blocks on the network, may be called by any thread.

        Args:
            message: one of the kinds that both ends agreed on.
            payload: any contiguous buffer of at most MAX_PAYLOAD bytes. It is not copied: leave it untouched until the
                receiver has acknowledged the message. An empty one arrives as None.
            urgent: overtake what is queued and not urgent, at the boundary between messages.

        Returns:
            False when the connection is over and the message was dropped; the handler is told so by `lost`.

        Raises:
            ValueError: the message is too large; the caller's fault.
        """
        assert self._out is not None, "a peer is given out once it has joined"
        view = NOTHING if payload is None else memoryview(payload).cast("B")
        return self._out.add(message, self._codec.encode(message), view, urgent=urgent)

    def keep(self, count: int) -> None:
        """Count `count` bytes of payload, which are kept though nobody has asked for them, as not read yet.

        So the peer stops when its window is full of such, and memory for them has a bound. Only from `received`, for
        what it was given.
        """
        with self._lock:
            self._connection.kept += count

    def let_go(self, count: int) -> None:
        """Give credit for what was kept; may be called by any thread."""
        with self._lock:
            self._connection.kept -= count
        self._give_credit()

    def offer_turn(self) -> None:
        """Have the reader thread rest after this, for the next wait to read by itself; only from `received`.

        After a long message it goes on reading: more may come while nobody waits, and then costs nobody's time.
        """
        self.turn.offered = self._came <= SHORT

    def read_here(self, over: Callable[[], bool], seconds: float) -> bool:
        """Read on this thread, which took the turn, until `over()` (asked when something came) or so long a silence."""
        try:
            while self._over is None and self._fault is None and self._stream.arrives(seconds):
                self._take_in(patient=False)
                self._over = self._hand_on()
                if over():
                    return True
        except Exception as fault:  # noqa: BLE001  the reader thread ends the connection for it, and tells by lost()
            self._fault = fault
        except BaseException as fault:
            self._fault = InterruptedError(f"reading was interrupted by {type(fault).__name__}")
            raise
        finally:
            self.turn.give()
            if self._over is not None or self._fault is not None:
                self.turn.recall()
        return False

    @property
    def on_written(self) -> Callable[[Any, int], None] | None:
        """Called with (message, bytes on the wire) once the network has all of a message, on a thread that sends."""
        return self._outgoing.on_written

    @on_written.setter
    def on_written(self, call: Callable[[Any, int], None] | None) -> None:
        self._outgoing.on_written = call

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, all counted."""
        return self._out.bytes if self._out is not None else 0

    @property
    def _outgoing(self) -> OutgoingQueue:
        assert self._out is not None, "a peer is given out once it has joined"
        return self._out

    def pending(self) -> int:
        """Return the bytes that are queued and not handed to the network yet."""
        return self._out.pending() if self._out is not None else 0

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the peer's system holds all that was queued: a close, or our own death, then loses nothing of it.

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
        """End the connection: say goodbye with `reason`, drop what is queued (see `flush`); `lost` follows.

        May be called by any thread, also from the handler, and twice; it does not wait for the threads' end.
        """
        with self._lock:
            if self._closing is not None or self._ended is not None:
                return
            self._closing = reason or "closed"
        self._goodbye(self._closing)
        self.turn.recall()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until `lost` has returned and both threads have ended; False when that took longer than `timeout`."""
        if self._reader is not None:
            self._reader.join(timeout)
        return self._reader is None or not self._reader.is_alive()

    # ---- the handshake, by the thread that dialled or accepted -----------------------------------------------------

    def settle(self, decide: Callable[[Member], str | None], patience: float) -> None:
        """Shake hands: afterwards the connection is made, or ended with a reason.

        Args:
            decide: says why the member that the certificate names is not wanted; None: it is.
            patience: seconds for all of it.

        Raises:
            ProtocolError: the peer is a stranger, not wanted, does not want us, or breaks the protocol.
            PeerLost: it ended, or took too long.
        """
        deadline = time.monotonic() + patience
        try:
            joined = self._shake(decide, deadline)
            self._stream.limit(None)
            self._out = OutgoingQueue(self._stream, self._connection.seal, joined.window, f"psctl writer {self.member}")
        except ConnectionFailed as error:
            with contextlib.suppress(OSError):  # the last word (why, or TLS's alert) is worth an attempt
                self._stream.limit(0.5)
                self._send_handshake()
            raise self._fail(type(error), error.message) from error
        except OSError as error:
            why = f"no handshake within {patience:g} s" if time.monotonic() >= deadline else why_gone(error)
            raise self._fail(PeerLost, why) from error
        except BaseException:
            self.abandon()
            raise

    def _shake(self, decide: Callable[[Member], str | None], deadline: float) -> Joined:
        while True:
            event = self._connection.next_event()
            self._send_handshake_until(deadline)
            match event:
                case None:
                    self._stream.limit(max(0.001, deadline - time.monotonic()))
                    self._take_in()
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
            self._connection.accept()
            return
        self._connection.refuse(against)
        raise ProtocolError(f"refused: {against}")

    def _send_handshake_until(self, deadline: float) -> None:
        self._stream.limit(max(0.001, deadline - time.monotonic()))
        try:
            self._send_handshake()
        except ConnectionError:
            # The other end has gone. What it said before may still lie here (why it refused us); reading finds that.
            self._connection.outgoing()

    def _send_handshake(self) -> None:
        if data := self._connection.outgoing():
            self._stream.send(memoryview(data))

    def _fail(self, kind: type[ConnectionFailed], reason: str) -> ConnectionFailed:
        self.abandon()
        return kind(f"{self.name}: {reason}", where=self.name)

    def abandon(self) -> None:
        """Give up a connection that is not made, from the thread that makes it."""
        self._stream.shutdown()
        self._stream.close()
        self._connection.release()

    # ---- the reader thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads of a settled connection."""
        self._reader = threading.Thread(target=self.run, name=f"psctl reader {self.member}", daemon=True)
        self._reader.start()

    def run(self) -> None:
        """Be the reader thread until the end."""
        self._reader = threading.current_thread()
        self._outgoing.start()
        try:
            self._handler.on_connected(self)
            error = self._read()
        except ProtocolError as fault:
            error = type(fault)(f"{self.name}: {fault.message}", where=self.name)
            self._goodbye(fault.message)
        except OSError as fault:
            error = self._failure(why_gone(fault))
        except Exception as fault:  # noqa: BLE001  the handler's fault, whatever it is; told by lost(), never swallowed
            error = self._failure(f"our handler failed: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._goodbye(error.message)
        self._end(error)

    def _read(self) -> ConnectionFailed:
        """Hand on what arrives; return why nothing more does."""
        self.turn.begin()
        while True:
            if self._fault is not None:
                raise self._fault
            over = self._over or self._hand_on()
            if over is not None:
                return over
            if self.turn.offered:
                self.turn.rest()
            else:
                self._take_in()

    def _hand_on(self) -> ConnectionFailed | None:
        """Hand on what has arrived; return why nothing more does, None while more may."""
        connection, handler, out = self._connection, self._handler, self._outgoing
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
                    handler.on_message(self, message, payload)
                case None:
                    if corked:
                        out.cork(None)
                    return None
                case Credited(count):
                    out.credit(count)
                case Left(reason):
                    return PeerLost(f"{self.name} left: {reason}", where=self.name)
                case Ended():
                    return self._failure("connection reset")
                case _:
                    raise AssertionError(f"{event} in an open connection")

    def _give_credit(self) -> None:
        connection, now = self._connection, time.monotonic()
        with self._lock:
            due = connection.unpaid - connection.kept
            if due < self._part or (due < CREDIT // 2 * self._part and now < self._credited + PAUSE):
                return
            self._credited, owed = now, connection.owed()
        self._outgoing.owe(owed)

    def _take_in(self, *, patient: bool = True) -> None:
        """Receive what there is; `patient`: sleep until it is as much as is of use."""
        connection = self._connection
        room, least = connection.room()
        count = self._came = self._stream.receive_into(room, least if patient else 1)
        connection.received(count)
        self.bytes_received += count

    def _failure(self, why: str) -> ConnectionFailed:
        """The error that tells why the connection is over, with what the writer knows better."""
        if self._closing is not None:
            return ConnectionFailed(f"{self.name}: closed here: {self._closing}", where=self.name)
        fault = self._out.error if self._out is not None else None
        if fault is not None and not isinstance(fault, ConnectionError):
            if isinstance(fault, OSError):
                why = why_gone(fault)
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
        """Say Bye if that is possible at once, then end the stream."""
        if self._out is not None:
            self._out.stop()
            self._out.goodbye(reason)
        self._stream.shutdown()
