"""One connection without its socket: bytes in, events out; one class for both ends.

Use: receive into `space()`, report the count with `add_received`, then take `next_event()` until it returns None (more
bytes are needed). Until Joined, send what `outgoing()` returns after every call; afterwards frames are written with
`seal`. Reading and sealing share no state, so one thread may do each. A ProtocolError ends the connection; no event
follows it.

Both ends walk through the same states; TABLE lists every allowed pair of state and action. A missing pair is a fault
of the peer (ProtocolError) or of this end (assert). In every state, a fault or the end of the stream leads to ENDED.

    HANDSHAKE --verified--> NAMED --accept--> KEYING --their keys--> OPEN --bye--> ENDED
                              '-----refuse----'-------refusal--------------------->

HANDSHAKE   TLS 1.3; both certificates are verified against the job's authority. All bytes are TLS records.
NAMED       The peer is known, and this end has not decided yet. Nothing more is read until it has.
KEYING      This end has sent KeyExchange inside TLS; the peer's is the only record that may arrive. It is the last
            one of TLS: the next byte belongs to a frame. Neither end sends a frame before it has read the other's
            KeyExchange, so a frame that can be opened proves that this end's key was received, by the very process that
            the certificate names.
OPEN        Frames travel both ways, sealed or, where both ends are set so, open. Only now does the connection count as
            made.
ENDED       Over, whatever the reason.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from psctl.errors import ProtocolError
from psctl.permits import WireMessage
from psctl.transport.protocol.authority import read_identity
from psctl.transport.protocol.connection_messages import PROTOCOL, Bye, ConnectionRefused, Credit, KeyExchange, Long
from psctl.transport.protocol.frames import (
    CONTROL,
    COST,
    DIRECT,
    KEY,
    MESSAGE,
    PIECE,
    PREFIX,
    REKEY,
    Bytes,
    Cipher,
    FrameOpener,
    OpenFrames,
    Prefix,
    derive,
    read_prefix,
    write_frame,
    write_open_frame,
)
from psctl.transport.protocol.message_assembly import (
    Codec,
    MessageAssembler,
    ReceiveBuffer,
    ReceiveBufferFor,
    Received,
)
from psctl.transport.protocol.send_queue import SMALLEST_WINDOW, Frame
from psctl.transport.protocol.tls_records import MAX_RECORD, Records
from psctl.types import UNDECODABLE, Member

STRANGER = 64 << 10
"""Bytes that an end may send before its certificate is verified."""
HALF_ID = 16

# Made here and not at first use: msgspec crashes when threads make it learn a type at the same moment.
_KEYS = msgspec.msgpack.Decoder(KeyExchange | ConnectionRefused)
_CONTROL = msgspec.msgpack.Decoder(Credit | Bye | Long)


class ConnectionState(Enum):
    """The state of one connection at one end."""

    HANDSHAKE = "in the TLS handshake"
    NAMED = "waiting for our decision"
    KEYING = "waiting for its keys"
    OPEN = "open"
    ENDED = "ended"


class Ours(Enum):
    """Actions of this end."""

    ACCEPT = "accept"
    REFUSE = "refuse"


class Theirs(Enum):
    """Actions of the peer."""

    VERIFIED = "a verified certificate"
    KEYS = "keys"
    REFUSED = "a refusal"
    BYE = "a goodbye"
    END = "the end of its stream"
    FAULT = "what the protocol does not allow"


S = ConnectionState
TABLE: dict[tuple[ConnectionState, Ours | Theirs], ConnectionState] = {
    (S.HANDSHAKE, Theirs.VERIFIED): S.NAMED,
    (S.NAMED, Ours.ACCEPT): S.KEYING,
    (S.NAMED, Ours.REFUSE): S.ENDED,
    (S.KEYING, Theirs.KEYS): S.OPEN,
    (S.KEYING, Theirs.REFUSED): S.ENDED,
    (S.OPEN, Theirs.BYE): S.ENDED,
    **{(state, Theirs.END): S.ENDED for state in S},
    **{(state, Theirs.FAULT): S.ENDED for state in S},
}


def after(state: ConnectionState, step: Ours | Theirs) -> ConnectionState:
    """Return the next state.

    Raises:
        ProtocolError: the peer may not do this in this state.
        AssertionError: this end may not.
    """
    follows = TABLE.get((state, step))
    if follows is not None:
        return follows
    assert isinstance(step, Theirs), f"this end may not do this now: {step.value} while {state.value}"
    raise ProtocolError(f"it sent {step.value} while the connection was {state.value}")


@dataclass(frozen=True, slots=True)
class Named:
    """The peer's certificate is verified and names this member; call `accept` or `refuse`."""

    member: Member


@dataclass(frozen=True, slots=True)
class Joined:
    """The connection is made. `window`: bytes that the peer can hold unread."""

    window: int


class Credited(msgspec.Struct, frozen=True):
    """The peer has read so many bytes."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Left:
    """The peer ended the connection in order."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ended without a goodbye; `cut` when it ended inside a frame or record."""

    cut: bool


def _no_buffer(message: WireMessage, size: int) -> None:
    raise AssertionError("the connection is over")


Event = Named | Joined | Received | Credited | Left | Ended


class ConnectionProtocol:
    """Both directions of one connection.

    Args:
        context: TLS context of this end; it verifies the peer against the job's authority.
        accepting: this is the accepting end.
        job: name of the job.
        me: this end's member, as its certificate names it.
        codec: the application's messages.
        window: bytes that this end's socket holds unread at least.
        receive_buffer_for: returns where the payload of a message goes, a writable view of exactly its size; None:
            the connection provides a buffer, which is valid until the next event.
        sealed: frames are encrypted; both ends must agree.
        rekey: seals until the next key; both ends must agree.
        random: source of fresh random bytes.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        accepting: bool,
        job: str,
        me: Member,
        codec: Codec,
        window: int,
        receive_buffer_for: ReceiveBufferFor,
        sealed: bool = True,
        rekey: int = REKEY,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.state = ConnectionState.HANDSHAKE
        self._tls = Records(context, accepting=accepting)
        self._job, self._me, self._codec, self._window, self._rekey = job, me, codec, window, rekey
        self._random, self._accepting, self._sealed = random, accepting, sealed
        self._peer: Member | None = None
        self._buffer = ReceiveBuffer()
        self._unverified = 0  # bytes received before the peer's certificate was verified
        self._needed = MAX_RECORD
        self._finished = False
        self._taken = self._given = 0  # bytes of the window that frames have taken; that were given back as credit
        self.kept = 0
        """Bytes that were read and get no credit, because the application retains them."""
        self._assembler = MessageAssembler(codec, receive_buffer_for)
        # The rest of a payload that is received where it goes, and what is called when it is complete.
        self._filling: tuple[memoryview, Callable[[], Event | None]] | None = None

    # ---- bytes in ------------------------------------------------------------------------------------------------

    def space(self) -> tuple[memoryview, int]:
        """Return where to receive the next bytes; to be called when `next_event` returned None.

        Returns:
            The space, and how many bytes must arrive, as far as is known, before `next_event` returns an event.
        """
        if self._filling is not None:
            return self._filling[0], len(self._filling[0])
        unread = self._buffer.end - self._buffer.start
        least = max(1, self._needed - unread)
        return self._buffer.space(unread + least), least

    def add_received(self, count: int) -> None:
        """Note that `count` bytes were received into `space()`; 0: the stream has ended."""
        if self._filling is not None:
            rest, done = self._filling
            self._filling = rest[count:], done
        else:
            self._buffer.add_received(count)
        self._finished = self._finished or count == 0

    def next_event(self) -> Event | None:
        """Return what happened next, or None when more bytes (or a decision) are needed.

        Raises:
            ProtocolError: the peer sent what the protocol does not allow.
            Exception: raised by `receive_buffer_for`; a fault of this end.
        """
        try:
            event = self._frame() if self.state is ConnectionState.OPEN else self._step()
            if event is None and self._finished and self.state not in (ConnectionState.ENDED, ConnectionState.NAMED):
                self._go(Theirs.END)
                return Ended(cut=len(self._buffer) > 0 or self._filling is not None)
        except ProtocolError:
            self._go(Theirs.FAULT)
            raise
        return event

    def _step(self) -> Event | None:
        if self.state is ConnectionState.HANDSHAKE:
            return self._handshake()
        return self._read_keys() if self.state is ConnectionState.KEYING else None

    def _go(self, step: Ours | Theirs) -> None:
        self.state = after(self.state, step)

    def release(self) -> None:
        """Free memory; the connection is over and is not used again, though references to it may remain."""
        self._buffer, self._assembler = ReceiveBuffer(0), MessageAssembler(self._codec, _no_buffer)
        self._filling = None
        self._tls.release()

    # ---- the handshake -------------------------------------------------------------------------------------------

    def outgoing(self) -> bytes:
        """Return the TLS bytes to send now; empty once frames flow."""
        return self._tls.outgoing()

    def _next_record(self) -> bool:
        """Pass one whole TLS record to TLS, so that bytes after the last record remain in the buffer."""
        size = self._tls.take(self._buffer.data)
        self._needed = MAX_RECORD
        self._buffer.mark_read(size)
        self._unverified += size
        if self._unverified > STRANGER:
            raise ProtocolError(f"it sent more than {STRANGER} bytes before its certificate")
        return size > 0

    def _handshake(self) -> Named | None:
        while not self._tls.handshake():
            if not self._next_record():
                return None
        job, member = read_identity(self._tls.certificate())
        if job != self._job:
            raise ProtocolError(f"it belongs to job {job}, not to {self._job}")
        self._peer = member
        self._go(Theirs.VERIFIED)
        return Named(member)

    def accept(self) -> None:
        """Accept the named member: send our keys."""
        assert self._peer is not None, "Named comes first"
        self._go(Ours.ACCEPT)
        half = self._random(HALF_ID)
        self._ours = KeyExchange(
            PROTOCOL, self._job, self._me, self._peer, self._random(KEY), half, self._window, self._sealed
        )
        self._tls.write(msgspec.msgpack.encode(self._ours))

    def refuse(self, reason: str) -> None:
        """Refuse the named member: send the reason, and end."""
        self._go(Ours.REFUSE)
        self._tls.write(msgspec.msgpack.encode(ConnectionRefused(reason[:1000])))

    def _read_keys(self) -> Joined | None:
        while (data := self._tls.read()) is None:
            if not self._next_record():
                return None
        try:
            theirs = _KEYS.decode(data)
        except UNDECODABLE as error:
            raise ProtocolError(f"it sent no keys: {error}") from error
        if isinstance(theirs, ConnectionRefused):
            self._go(Theirs.REFUSED)
            raise ProtocolError(f"it refused us: {theirs.reason}")
        self._check_keys(theirs)
        halves = (theirs.connection, self._ours.connection)
        identity = b"".join(halves if self._accepting else reversed(halves))  # the dialler's half first
        opening = Cipher(derive(theirs.key, self._job, theirs.sender, self._me, identity), self._rekey)
        self._opened: FrameOpener | OpenFrames = FrameOpener(opening) if self._sealed else OpenFrames()
        self._sealing = Cipher(derive(self._ours.key, self._job, self._me, theirs.sender, identity), self._rekey)
        self._go(Theirs.KEYS)
        self._needed = PREFIX.size
        return Joined(theirs.window)

    def _check_keys(self, theirs: KeyExchange) -> None:
        if theirs.protocol != PROTOCOL:
            raise ProtocolError(f"it speaks protocol {theirs.protocol}, not {PROTOCOL}")
        if (theirs.job, theirs.sender, theirs.receiver) != (self._job, self._peer, self._me):
            raise ProtocolError(f"its keys are for {theirs.sender} to {theirs.receiver} of {theirs.job}")
        if theirs.sealed != self._sealed:
            modes = {True: "encrypts its frames", False: "does not encrypt its frames"}
            raise ProtocolError(f"it {modes[theirs.sealed]}, and this end {modes[self._sealed]} (network.encryption)")
        fresh = theirs.key != self._ours.key and theirs.connection != self._ours.connection
        if len(theirs.key) != KEY or len(theirs.connection) != HALF_ID or not fresh:
            raise ProtocolError("its keys have the wrong length or are ours")
        if theirs.window < SMALLEST_WINDOW:
            raise ProtocolError(f"it can hold only {theirs.window} bytes unread")

    # ---- frames in -----------------------------------------------------------------------------------------------

    @property
    def unpaid(self) -> int:
        """Bytes that were read and not given back as credit. Without the retained ones, the peer is owed them."""
        return self._taken - self._given

    def owed(self) -> int:
        """Return how much credit the peer is to be given, and count it as given; one thread at a time."""
        owed = max(0, self.unpaid - self.kept)
        self._given += owed
        return owed

    def _frame(self) -> Event | None:
        """Read the next frame, or a message that it completes; None when more bytes are needed."""
        buffer = self._buffer
        while True:
            if self._filling is not None:
                rest, done = self._filling
                if len(rest):
                    return None
                self._filling = None
                if (filled := done()) is not None:
                    return filled
            start = buffer.start
            there = buffer.end - start
            if there < PREFIX.size:
                self._needed = PREFIX.size
                return None
            prefix = read_prefix(buffer.store, start)
            kind, header_size, payload, size = prefix
            length = size if self._sealed else PREFIX.size + header_size + payload
            if there < length:
                if self._sealed or payload < DIRECT:
                    self._needed = length
                    return None
                self._needed = PREFIX.size + header_size
                if there < self._needed:
                    return None
                self._start_filling(prefix, buffer.store[start : start + there])
                buffer.mark_read(there)
                continue
            frame = buffer.store[start : start + length]
            buffer.mark_read(length)  # the bytes stay where they are until the next `space`
            if kind != CONTROL:
                self._take_window(size)
            if kind == PIECE:
                place = self._assembler.start_piece(payload)
                self._opened.piece(frame, place)
                event: Event | None = self._assembler.add_piece(place)
            else:
                header = self._opened.header(prefix, frame)
                if kind == MESSAGE:
                    message, into = self._assembler.message(header, payload)
                    return Received(message, self._opened.payload(prefix, frame, into) if payload else None)
                if kind == CONTROL:
                    event = self._control(header)
                else:
                    self._opened.payload(prefix, frame, self._assembler.start_message(header, payload))
                    event = None
            if event is not None:  # None: a part of something longer
                return event

    def _take_window(self, size: int) -> None:
        """Count a frame of the application, of `size` bytes if it is sealed."""
        self._taken += size + COST
        if self._taken - self._given > self._window:
            raise ProtocolError(f"it sent more than the {self._window} bytes that it had credit for")

    def _start_filling(self, prefix: Prefix, there: memoryview) -> None:
        """Begin to receive the payload of an open frame where it goes; `there`: its bytes so far, with all of its
        header."""
        kind, header_size, payload, size = prefix
        self._take_window(size)
        header, first = there[PREFIX.size : PREFIX.size + header_size], there[PREFIX.size + header_size :]
        assembler = self._assembler
        if kind == PIECE:
            place = assembler.start_piece(payload)
            done: Callable[[], Event | None] = lambda: assembler.add_piece(place)  # noqa: E731
        elif kind == MESSAGE:
            message, into = assembler.message(header, payload)
            place = memoryview(bytearray(payload)) if into is None else into
            done = lambda: Received(message, place)  # noqa: E731
        else:
            place = assembler.start_message(header, payload)
            done = lambda: None  # noqa: E731
        place[: len(first)] = first
        self._filling = place[len(first) :], done

    def _control(self, header: Bytes) -> Event | None:
        try:
            message = _CONTROL.decode(header)
        except UNDECODABLE as error:
            raise ProtocolError(f"it sent an unknown control frame: {error}") from error
        if isinstance(message, Credit):
            return Credited(message.bytes)
        if isinstance(message, Bye):
            self._go(Theirs.BYE)
            return Left(message.reason)
        self._assembler.start_long_header(message)
        return None

    # ---- frames out ----------------------------------------------------------------------------------------------

    def seal(self, frame: Frame, out: memoryview) -> int:
        """Write the next frame into the start of `out`, which is long enough; return its size in bytes."""
        if not self._sealed:
            return write_open_frame(frame.kind, frame.header, frame.payload, out)
        return write_frame(self._sealing, frame.kind, frame.header, frame.payload, out)
