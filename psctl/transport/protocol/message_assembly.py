"""From bytes to messages: the receive buffer, the codec of message headers, and the assembly of long messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from psctl.errors import MessageRefused, ProtocolError
from psctl.permits import SHORT, MessageKinds, Permits, WireMessage
from psctl.transport.protocol.connection_messages import Long
from psctl.transport.protocol.frames import MAX_HEADER, MAX_PAYLOAD, WHOLE, Bytes
from psctl.types import UNDECODABLE

LONGEST_TAG = 64
"""Bytes within which a message's tag lies."""

ReceiveBufferFor = Callable[[WireMessage, int], memoryview | None]
"""Called with a message and its payload's size: returns a writable view for the payload, or None for a new buffer."""


class Codec:
    """Encoder and decoder of the application's messages.

    Args:
        kinds: the permits of all messages, or a msgspec tagged union; other messages are refused.
    """

    def __init__(self, kinds: Permits | MessageKinds) -> None:
        self.permits = kinds if isinstance(kinds, Permits) else None
        """The permits of all messages; None: there are none."""
        union = kinds.union if isinstance(kinds, Permits) else kinds
        self.encode: Callable[[WireMessage], bytes] = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[Bytes], WireMessage] = msgspec.msgpack.Decoder(union).decode

    def decode(self, header: Bytes) -> WireMessage:
        """Return the message of a whole header.

        Raises:
            MessageRefused: it is not a known message, or longer than its kind may be.
        """
        if len(header) > SHORT:
            self.admit(header, len(header))
        try:
            return self._decode(header)
        except UNDECODABLE as error:
            raise MessageRefused(f"it sent an unknown message: {error}") from error

    def admit(self, start: Bytes, size: int) -> None:
        """Refuse a message that is longer than its kind may be, by its first bytes.

        Args:
            start: at least its first LONGEST_TAG bytes, or all of it.
            size: of the whole header.

        Raises:
            MessageRefused: it is too long.
        """
        if self.permits is None:
            return
        name = _tag(start)
        most = self.permits.sizes.get(name, SHORT)
        if size > most:
            raise MessageRefused(f"it sent a {name or 'message of no name'} of {size} bytes, more than {most}")


def _tag(start: Bytes) -> str:
    """Return the tag of an encoded message, "" where it does not begin with one."""
    head = bytes(start[:LONGEST_TAG])
    for at in (1, 3, 5):  # after the head of a map, which msgpack has in three sizes
        if head[at : at + 5] == b"\xa4type" and len(head) > at + 5 and head[at + 5] & 0xE0 == 0xA0:
            return head[at + 6 : at + 6 + (head[at + 5] & 0x1F)].decode("ascii", "replace")
    return ""


SMALL = 64 << 10


class ReceiveBuffer:
    """Bytes that were received and are not read yet.

    Args:
        size: bytes of the buffer; it grows when a frame needs more.
    """

    def __init__(self, size: int = SMALL) -> None:
        self.store = memoryview(bytearray(size))
        """The whole buffer; its unread bytes, from `start` to `end`, are valid until the next call of `space`."""
        self.start = 0
        self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def data(self) -> memoryview:
        """The unread bytes."""
        return self.store[self.start : self.end]

    def space(self, needed: int) -> memoryview:
        """Return free space to receive into, placed so that `needed` unread bytes will be contiguous."""
        unread = self.end - self.start
        assert unread < needed, "all needed bytes are here"
        if needed > len(self.store):
            self._move_to(memoryview(bytearray(needed + SMALL)))
        elif unread == 0:
            self.start = self.end = 0
        elif needed > len(self.store) - self.start:
            self._move_to(self.store)
        return self.store[self.end :]

    def _move_to(self, store: memoryview) -> None:
        unread = self.end - self.start
        store[:unread] = self.store[self.start : self.end]
        self.store, self.start, self.end = store, 0, unread

    def add_received(self, count: int) -> None:
        """Note that `count` bytes were received into `space`."""
        self.end += count
        assert self.end <= len(self.store), "more was received than there was space for"

    def mark_read(self, count: int) -> None:
        """Note that the first `count` unread bytes were read."""
        self.start += count
        assert self.start <= self.end, "more was read than was received"


class Received(msgspec.Struct, frozen=True):
    """A message of the application. A payload that the handler gave no buffer for is valid until the next event."""

    message: WireMessage
    payload: memoryview | None


@dataclass(slots=True)
class PartialMessage:
    """A long message that is arriving in pieces."""

    header: int
    payload: int
    head: bytearray
    message: WireMessage | None = None
    into: memoryview | None = None
    filled: int = 0


class MessageAssembler:
    """Assembles the messages of one connection.

    Args:
        codec: of the application's messages.
        receive_buffer_for: as ConnectionProtocol has it.
    """

    def __init__(self, codec: Codec, receive_buffer_for: ReceiveBufferFor) -> None:
        self._codec, self._receive_buffer_for = codec, receive_buffer_for
        self._long: PartialMessage | None = None

    def message(self, header: memoryview, payload: int) -> tuple[WireMessage, memoryview | None]:
        """Return the message of a frame that holds a whole one, which may arrive between the pieces of another, and
        where its payload goes; None: anywhere."""
        message = self._codec.decode(header)
        return message, self._buffer_for(message, payload) if payload else None

    def start_message(self, header: memoryview, payload: int) -> memoryview:
        """Start a message whose payload continues in pieces; return where its first `payload` bytes go."""
        (whole,) = WHOLE.unpack_from(header)
        self._check_no_other()
        if not payload < whole <= MAX_PAYLOAD:
            raise ProtocolError(f"it announced {whole} bytes of payload and sent {payload}")
        message = self._codec.decode(header[WHOLE.size :])
        into = self._buffer_for(message, whole) or memoryview(bytearray(whole))
        self._long = PartialMessage(0, whole, bytearray(), message, into, payload)
        return into[:payload]

    def start_long_header(self, announced: Long) -> None:
        """Start a message whose header arrives in pieces too."""
        self._check_no_other()
        if not (0 < announced.header <= MAX_HEADER and 0 <= announced.payload <= MAX_PAYLOAD):
            raise ProtocolError(f"it announced {announced.header} bytes of header and {announced.payload} of payload")
        self._long = PartialMessage(announced.header, announced.payload, bytearray())

    def _check_no_other(self) -> None:
        if self._long is not None:
            raise ProtocolError("it began a long message inside another")

    def start_piece(self, size: int) -> memoryview:
        """Return where the next piece of the long message goes; `add_piece` follows. Memory grows with what arrives.

        Raises:
            ProtocolError: there is no long message, or less of it is missing.
        """
        long = self._long
        if long is None:
            raise ProtocolError("it sent a piece of no message")
        missing = long.header - len(long.head) if long.into is None else long.payload - long.filled
        if size > missing:
            raise ProtocolError("it sent a piece that is longer than what is missing")
        return memoryview(bytearray(size)) if long.into is None else long.into[long.filled : long.filled + size]

    def add_piece(self, piece: memoryview) -> Received | None:
        """Add a piece that has arrived in the place of `start_piece`; return the message when it is whole."""
        long = self._long
        assert long is not None, "start_piece comes first"
        if long.into is None:
            return self._add_to_header(long, piece)
        long.filled += len(piece)
        return self._finish(long) if long.filled == long.payload else None

    def _add_to_header(self, long: PartialMessage, piece: memoryview) -> Received | None:
        if not long.head:
            self._codec.admit(piece, long.header)
        long.head += piece
        if len(long.head) < long.header:
            return None
        long.message = self._codec.decode(long.head)
        if not long.payload:
            return self._finish(long)
        long.into = self._buffer_for(long.message, long.payload) or memoryview(bytearray(long.payload))
        return None

    def _finish(self, long: PartialMessage) -> Received:
        self._long = None
        assert long.message is not None, "its header is whole"
        return Received(long.message, long.into)

    def _buffer_for(self, message: WireMessage, size: int) -> memoryview | None:
        view = self._receive_buffer_for(message, size)
        if view is not None:
            view = view.cast("B")
            assert view.nbytes == size, f"receive_buffer_for() returned {view.nbytes} bytes for a payload of {size}"
        return view
