"""One connection without its socket: bytes in, events out; one class for both ends.

Use: receive into `room()`, say how much with `received`, then take `next_event()` until it returns None (more bytes are
needed). Until Joined, send what `outgoing()` returns after every call; afterwards frames are written with `seal`.
Reading and sealing touch nothing in common, so one thread may do each.
A ProtocolError ends the connection; nothing is delivered after it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from psctl.errors import MessageRefused, ProtocolError
from psctl.permits import SHORT, Permits
from psctl.transport.protocol.assembly import MessageAssembler, Place, Received
from psctl.transport.protocol.authority import read_identity
from psctl.transport.protocol.connection_messages import PROTOCOL, Bye, ConnectionRefused, Credit, KeyExchange, Long
from psctl.transport.protocol.connection_states import ConnectionState, Ours, Theirs, after
from psctl.transport.protocol.frames import (
    CONTROL,
    COST,
    MESSAGE,
    PIECE,
    PREFIX,
    FrameOpener,
    read_prefix,
    write_frame,
)
from psctl.transport.protocol.receive_buffer import ReceiveBuffer
from psctl.transport.protocol.sealing import KEY, REKEY, Bytes, Cipher, derive
from psctl.transport.protocol.send_queue import SMALLEST_WINDOW, Frame
from psctl.transport.protocol.tls_records import MAX_RECORD, Records
from psctl.types import Member

STRANGER = 64 << 10
"""Bytes that an end may send before it has shown who it is."""
HALF_ID = 16

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""What msgspec raises for bytes that are no message: text that is no UTF-8 is a ValueError."""

# Made here and not at first use: threads that have msgspec learn a type at the same moment crash it.
_KEYS = msgspec.msgpack.Decoder(KeyExchange | ConnectionRefused)
_SAID = msgspec.msgpack.Decoder(Credit | Bye | Long)


class Codec:
    """Encoder and decoder of the application's messages.

    Args:
        kinds: the rows of all messages, or a msgspec tagged union; what is not of it is refused.
    """

    def __init__(self, kinds: Any) -> None:
        union = kinds.union if isinstance(kinds, Permits) else kinds
        self._sizes = kinds.sizes if isinstance(kinds, Permits) else None
        self.encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[Bytes], Any] = msgspec.msgpack.Decoder(union).decode

    def decode(self, header: Bytes) -> Any:
        """Return the message of a whole header.

        Raises:
            MessageRefused: it is none, or longer than one of its kind may be.
        """
        if len(header) > SHORT:
            self.admit(header, len(header))
        try:
            return self._decode(header)
        except UNREADABLE as error:
            raise MessageRefused(f"it sent a message of no kind known here: {error}") from error

    def admit(self, start: Bytes, size: int) -> None:
        """Refuse a message that is longer than one of its kind may be, by the first bytes of it.

        Args:
            start: at least its first LONGEST_TAG bytes, or all of it.
            size: of all of it.

        Raises:
            MessageRefused: it is too long.
        """
        if self._sizes is None:
            return
        name = _tag(start)
        most = self._sizes.get(name, SHORT)
        if size > most:
            raise MessageRefused(f"it sent a {name or 'message of no name'} of {size} bytes, more than {most}")


LONGEST_TAG = 64
"""Bytes within which a message's tag stands."""


def _tag(start: Bytes) -> str:
    """Return the tag of an encoded message, "" where it does not begin with one."""
    head = bytes(start[:LONGEST_TAG])
    for at in (1, 3, 5):  # behind the head of a map: msgpack has it in three sizes
        if head[at : at + 5] == b"\xa4type" and len(head) > at + 5 and head[at + 5] & 0xE0 == 0xA0:
            return head[at + 6 : at + 6 + (head[at + 5] & 0x1F)].decode("ascii", "replace")
    return ""


@dataclass(frozen=True, slots=True)
class Named:
    """The peer's certificate is verified and names this member; answer with `accept` or `refuse`."""

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
    """The peer said goodbye."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ended without a goodbye; `cut` when it ended inside a frame or record."""

    cut: bool


def _nowhere(message: Any, size: int) -> None:
    raise AssertionError("the connection is over")


Event = Named | Joined | Received | Credited | Left | Ended


class ConnectionProtocol:
    """Both directions of one connection.

    Args:
        context: TLS context of this end (net/ makes it); it verifies the peer against the job's authority.
        accepting: the other end dialled.
        job: name of the job.
        me: who this end is, as its certificate says.
        codec: the application's messages.
        window: bytes that this end's socket holds unread, for sure.
        place: says where the payload of a message goes: a writable view of exactly its size, or None: a buffer lent
            until the next event.
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
        place: Place,
        rekey: int = REKEY,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.state = ConnectionState.HANDSHAKE
        self._tls = Records(context, accepting=accepting)
        self._job, self._me, self._codec, self._window, self._rekey = job, me, codec, window, rekey
        self._random, self._accepting = random, accepting
        self._peer: Member | None = None
        self._buffer = ReceiveBuffer()
        self._strange = 0
        self._needed = MAX_RECORD
        self._finished = False
        self._taken = self._given = 0  # bytes of the window that frames have taken; that were given back as credit
        self.kept = 0
        """Bytes that were read and are kept aside: no credit is given for them until they are let go."""
        self._assembler = MessageAssembler(codec, place)

    # ---- bytes in ------------------------------------------------------------------------------------------------

    def room(self) -> tuple[memoryview, int]:
        """Return where to receive the next bytes; to be called when `next_event` returned None.

        Returns:
            The room, and how many bytes must come, as far as is known, before `next_event` has something to say.
        """
        unread = self._buffer.end - self._buffer.start
        least = max(1, self._needed - unread)
        return self._buffer.room(unread + least), least

    def received(self, count: int) -> None:
        """Note that `count` bytes were received into `room()`; 0: the stream has ended."""
        self._buffer.wrote(count)
        self._finished = self._finished or count == 0

    def receive(self, data: Bytes) -> None:
        """Take in bytes that lie elsewhere (a copy; `room` and `received` do without)."""
        rest = memoryview(data)
        while rest:
            room, _ = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]

    def next_event(self) -> Event | None:
        """Return what happened next, or None when more bytes (or a decision) are needed.

        Raises:
            ProtocolError: the peer sent what the protocol does not allow.
            Exception: what `place` raised; our own side's fault.
        """
        try:
            event = self._frame() if self.state is ConnectionState.OPEN else self._step()
            if event is None and self._finished and self.state not in (ConnectionState.ENDED, ConnectionState.NAMED):
                self._go(Theirs.END)
                return Ended(cut=len(self._buffer) > 0)
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
        """Give memory back; the connection is over, and is not asked again. Whoever holds it may do so for long."""
        self._buffer, self._assembler = ReceiveBuffer(0), MessageAssembler(self._codec, _nowhere)
        self._tls.release()

    # ---- the handshake -------------------------------------------------------------------------------------------

    def outgoing(self) -> bytes:
        """Return the TLS bytes to send now; empty once frames flow."""
        return self._tls.outgoing()

    def _next_record(self) -> bool:
        """Hand one TLS record over; only whole ones, so that what lies behind the last stays here."""
        size = self._tls.take(self._buffer.data)
        self._needed = MAX_RECORD
        self._buffer.skip(size)
        self._strange += size
        if self._strange > STRANGER:
            raise ProtocolError(f"it sent more than {STRANGER} bytes before it had shown who it is")
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
        """The named member is wanted: send our keys."""
        assert self._peer is not None, "nobody was named yet"
        self._go(Ours.ACCEPT)
        half = self._random(HALF_ID)
        self._ours = KeyExchange(PROTOCOL, self._job, self._me, self._peer, self._random(KEY), half, self._window)
        self._tls.write(msgspec.msgpack.encode(self._ours))

    def refuse(self, reason: str) -> None:
        """The named member is not wanted: tell it why, and end."""
        self._go(Ours.REFUSE)
        self._tls.write(msgspec.msgpack.encode(ConnectionRefused(reason[:1000])))

    def _read_keys(self) -> Joined | None:
        while (data := self._tls.read()) is None:
            if not self._next_record():
                return None
        try:
            theirs = _KEYS.decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"it sent no keys: {error}") from error
        if isinstance(theirs, ConnectionRefused):
            self._go(Theirs.REFUSED)
            raise ProtocolError(f"it refused us: {theirs.reason}")
        self._check_keys(theirs)
        halves = (theirs.connection, self._ours.connection)
        identity = b"".join(halves if self._accepting else reversed(halves))  # the dialler's half first
        opening = Cipher(derive(theirs.key, self._job, theirs.sender, self._me, identity), self._rekey)
        self._opened = FrameOpener(opening)
        self._sealing = Cipher(derive(self._ours.key, self._job, self._me, theirs.sender, identity), self._rekey)
        self._go(Theirs.KEYS)
        self._needed = PREFIX.size
        return Joined(theirs.window)

    def _check_keys(self, theirs: KeyExchange) -> None:
        if theirs.protocol != PROTOCOL:
            raise ProtocolError(f"it speaks protocol {theirs.protocol}, not {PROTOCOL}")
        if (theirs.job, theirs.sender, theirs.receiver) != (self._job, self._peer, self._me):
            raise ProtocolError(f"its keys are for {theirs.sender} to {theirs.receiver} of {theirs.job}")
        fresh = theirs.key != self._ours.key and theirs.connection != self._ours.connection
        if len(theirs.key) != KEY or len(theirs.connection) != HALF_ID or not fresh:
            raise ProtocolError("its keys have the wrong length or are ours")
        if theirs.window < SMALLEST_WINDOW:
            raise ProtocolError(f"it can hold only {theirs.window} bytes unread")

    # ---- frames in -----------------------------------------------------------------------------------------------

    @property
    def unpaid(self) -> int:
        """Bytes that were read and not given back as credit. Less what is kept, it is what the peer is owed."""
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
            start = buffer.start
            there = buffer.end - start
            if there < PREFIX.size:
                self._needed = PREFIX.size
                return None
            prefix = read_prefix(buffer.store, start)
            kind, _, payload, size = prefix
            if there < size:
                self._needed = size
                return None
            frame = buffer.store[start : start + size]
            buffer.skip(size)  # the bytes stay where they are until the next `room`
            if kind != CONTROL:
                self._taken += size + COST
                if self._taken - self._given > self._window:
                    raise ProtocolError(f"it sent more than the {self._window} bytes that it had credit for")
            if kind == PIECE:
                event: Event | None = self._assembler.piece(self._opened, frame, payload)
            else:
                header = self._opened.header(prefix, frame)
                if kind == MESSAGE:
                    return self._assembler.message(self._opened, prefix, frame, header)
                if kind == CONTROL:
                    event = self._control(header)
                else:
                    self._assembler.begin(self._opened, prefix, frame, header)
                    event = None
            if event is not None:  # None: a part of something longer
                return event

    def _control(self, header: Bytes) -> Event | None:
        try:
            said = _SAID.decode(header)
        except UNREADABLE as error:
            raise ProtocolError(f"it sent a frame of no kind known here: {error}") from error
        if isinstance(said, Credit):
            return Credited(said.bytes)
        if isinstance(said, Bye):
            self._go(Theirs.BYE)
            return Left(said.reason)
        self._assembler.announced(said)
        return None

    # ---- frames out ----------------------------------------------------------------------------------------------

    def seal(self, frame: Frame, out: memoryview) -> int:
        """Write the next frame into the start of `out`, which has room for it; return its size in bytes."""
        return write_frame(self._sealing, frame.kind, frame.header, frame.payload, out)
