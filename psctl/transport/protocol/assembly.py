"""Messages out of frames: decoded, their payload where it belongs, long ones put together piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from psctl.errors import ProtocolError
from psctl.transport.protocol.connection_messages import Long
from psctl.transport.protocol.frames import MAX_HEADER, MAX_PAYLOAD, WHOLE, FrameOpener, Prefix
from psctl.transport.protocol.sealing import Bytes

Place = Callable[[Any, int], memoryview | None]


class HeaderDecoder(Protocol):
    """What makes messages of headers; Codec is one."""

    def decode(self, header: Bytes) -> Any: ...
    def admit(self, start: Bytes, size: int) -> None: ...


class Received(msgspec.Struct, frozen=True):
    """A message of the application; a payload that was not placed is lent until the next call."""

    message: Any
    payload: memoryview | None


@dataclass(slots=True)
class PartialMessage:
    """A long message that is arriving in pieces."""

    header: int
    payload: int
    head: bytearray
    message: Any = None
    into: memoryview | None = None
    filled: int = 0


class MessageAssembler:
    """What one connection has of messages that are not whole.

    Args:
        codec: of the application's messages.
        place: as Connection has it.
    """

    def __init__(self, codec: HeaderDecoder, place: Place) -> None:
        self._codec, self._place = codec, place
        self._long: PartialMessage | None = None

    def message(self, opened: FrameOpener, prefix: Prefix, frame: memoryview, header: memoryview) -> Received:
        """Return the message that a frame holds whole; also between the pieces of another."""
        message, payload = self._codec.decode(header), prefix[2]
        if not payload:
            return Received(message, None)
        return Received(message, opened.payload(prefix, frame, self._placed(message, payload)))

    def begin(self, opened: FrameOpener, prefix: Prefix, frame: memoryview, header: memoryview) -> None:
        """Begin a message whose payload goes on in pieces."""
        payload, (whole,) = prefix[2], WHOLE.unpack_from(header)
        self._alone()
        if not payload < whole <= MAX_PAYLOAD:
            raise ProtocolError(f"it announced {whole} bytes of payload and sent {payload}")
        message = self._codec.decode(header[WHOLE.size :])
        into = self._placed(message, whole) or memoryview(bytearray(whole))
        opened.payload(prefix, frame, into[:payload])
        self._long = PartialMessage(0, whole, bytearray(), message, into, payload)

    def announced(self, said: Long) -> None:
        """Begin a message that comes in nothing but pieces."""
        self._alone()
        if not (0 < said.header <= MAX_HEADER and 0 <= said.payload <= MAX_PAYLOAD):
            raise ProtocolError(f"it announced {said.header} bytes of header and {said.payload} of payload")
        self._long = PartialMessage(said.header, said.payload, bytearray())

    def _alone(self) -> None:
        if self._long is not None:
            raise ProtocolError("it began a long message inside another")

    def piece(self, opened: FrameOpener, frame: memoryview, size: int) -> Received | None:
        """Add a piece to the long message; memory grows with what has really arrived."""
        long = self._long
        if long is None:
            raise ProtocolError("it sent a piece of no message")
        if long.into is None:
            return self._piece_of_header(long, opened, frame, size)
        filled = long.filled + size
        if filled > long.payload:
            raise ProtocolError("it sent a piece that is longer than what is missing")
        opened.piece(frame, long.into[long.filled : filled])
        long.filled = filled
        return self._whole(long) if filled == long.payload else None

    def _piece_of_header(
        self, long: PartialMessage, opened: FrameOpener, frame: memoryview, size: int
    ) -> Received | None:
        missing = long.header - len(long.head)
        if size > missing:
            raise ProtocolError("it sent a piece that is longer than what is missing")
        piece = bytearray(size)
        opened.piece(frame, memoryview(piece))
        if not long.head:
            self._codec.admit(piece, long.header)
        long.head += piece
        if size < missing:
            return None
        long.message = self._codec.decode(long.head)
        if not long.payload:
            return self._whole(long)
        long.into = self._placed(long.message, long.payload) or memoryview(bytearray(long.payload))
        return None

    def _whole(self, long: PartialMessage) -> Received:
        self._long = None
        return Received(long.message, long.into)

    def _placed(self, message: Any, size: int) -> memoryview | None:
        view = self._place(message, size)
        if view is not None:
            view = view.cast("B")
            assert view.nbytes == size, f"place() gave {view.nbytes} bytes for a payload of {size}"
        return view
