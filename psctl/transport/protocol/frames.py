"""Frames: a fixed prefix with lengths, a sealed header, a sealed payload.

    kind 1 | bytes of header 4 | bytes of payload 4 | header sealed (+16) | payload sealed (+16)
    kind 1 | bytes of header 4 | bytes of payload 4 | header and payload sealed (+16), where both have JOINT at most

The prefix is associated data of every seal. Lengths are checked against the limits before they are used. A short header
and payload have one seal together: a seal costs a microsecond and releases the interpreter's lock, a copy costs less.
In longer frames an empty part has no seal. Kinds:

    MESSAGE  a message of the application and its payload
    FIRST    a message whose payload continues in PIECEs; its header follows the whole payload's size in 8 bytes
    PIECE    payload only: the next bytes of the message that a FIRST began or a Long announced
    CONTROL  a message of the connection, without payload
"""

from __future__ import annotations

import struct

from psctl.errors import ProtocolError
from psctl.transport.protocol.sealing import TAG, Bytes, Cipher

MESSAGE, CONTROL, PIECE, FIRST = 1, 2, 3, 4
PREFIX = struct.Struct(">BII")
WHOLE = struct.Struct(">Q")

MAX_PAYLOAD = 1 << 36
"""Bytes of payload that any message may have, in pieces. The limit of a kind of message is in its permit (permits.py),
that of one message in the handler's `receive_buffer_for`."""
MAX_PIECE = 1 << 20
"""Bytes of payload that one frame may have."""
MAX_HEADER = 16 << 20
"""Bytes of header that a message may have, in pieces."""
FRAME_HEADER = 64 << 10
"""Bytes of header that one frame may have."""
COST = 512
"""Bytes of a window that a frame takes beyond its own: the kernel's bookkeeping counts against a socket's buffer."""
JOINT = 16 << 10
"""Bytes of header and payload up to which a frame has one seal."""

_KINDS = (MESSAGE, CONTROL, PIECE, FIRST)

Prefix = tuple[int, int, int, int]
"""The decoded prefix of a frame: kind, bytes of header, bytes of payload, bytes of the whole frame."""


def frame_size(header: int, payload: int) -> int:
    """Return the bytes of a frame with `header` bytes of header and `payload` bytes of payload."""
    both = header + payload
    if both <= JOINT or not header or not payload:
        return PREFIX.size + both + TAG
    return PREFIX.size + both + 2 * TAG


def read_prefix(data: Bytes, start: int = 0) -> Prefix:
    """Return the prefix at `start` of `data`, with its lengths checked.

    Raises:
        ProtocolError: unknown kind, or a length that the kind does not allow.
    """
    kind, header, payload = PREFIX.unpack_from(data, start)
    if kind == MESSAGE and 0 < header <= JOINT - payload:  # most frames are short and whole
        return kind, header, payload, PREFIX.size + header + payload + TAG
    if kind not in _KINDS:
        raise ProtocolError(f"it sent a frame of unknown kind {kind}")
    if header > FRAME_HEADER or payload > MAX_PIECE:
        raise ProtocolError(f"it sent an oversized frame: {header} bytes of header, {payload} of payload")
    if kind == PIECE:
        wrong = header or not payload
    else:
        wrong = not header or (kind == CONTROL and payload) or (kind == FIRST and (not payload or header <= WHOLE.size))
    if wrong:
        raise ProtocolError(f"it sent a frame of kind {kind} with {header} bytes of header, {payload} of payload")
    return kind, header, payload, frame_size(header, payload)


def write_frame(cipher: Cipher, kind: int, header: Bytes, payload: Bytes, out: memoryview) -> int:
    """Seal one frame into the start of `out` and return its size in bytes."""
    prefix = PREFIX.pack(kind, len(header), len(payload))
    start = PREFIX.size
    out[:start] = prefix
    both = len(header) + len(payload)
    if both <= JOINT:
        end = start + both + TAG
        cipher.seal(b"".join((header, payload)) if len(payload) else header, prefix, out[start:end])
        return end
    for part in (header, payload):
        if len(part):
            end = start + len(part) + TAG
            cipher.seal(part, prefix, out[start:end])
            start = end
    return start


class FrameOpener:
    """Opens the frames of one direction, in order: first the header, then the payload.

    Args:
        cipher: the cipher of the direction.
    """

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher
        self._short = memoryview(bytearray(JOINT))
        self._large = memoryview(b"")

    def header(self, prefix: Prefix, frame: memoryview) -> memoryview:
        """Return the header of a whole frame; it is valid until the next frame.

        Raises:
            ProtocolError: the seal does not hold.
        """
        _, header, payload, size = prefix
        start = PREFIX.size
        if header + payload <= JOINT:
            self._cipher.open(frame[start:size], frame[:start], self._short[: header + payload])
            return self._short[:header]
        into = self._short[:header] if header <= JOINT else memoryview(bytearray(header))
        self._cipher.open(frame[start : start + header + TAG], frame[:start], into)
        return into

    def payload(self, prefix: Prefix, frame: memoryview, into: memoryview | None) -> memoryview:
        """Decrypt the payload into `into`, which has exactly its size, and return it.

        With None the result is in a buffer of this object and is valid until the next frame.

        Raises:
            ProtocolError: the seal does not hold.
        """
        _, header, payload, size = prefix
        if header + payload <= JOINT:
            short = self._short[header : header + payload]
            if into is None:
                return short
            into[:] = short
            return into
        if into is None:
            into = self._large_buffer(payload)
        self._cipher.open(frame[size - payload - TAG : size], frame[: PREFIX.size], into)
        return into

    def piece(self, frame: memoryview, into: memoryview) -> None:
        """Decrypt the payload of a PIECE, which has no header, into `into`.

        Raises:
            ProtocolError: the seal does not hold.
        """
        self._cipher.open(frame[PREFIX.size :], frame[: PREFIX.size], into)

    def _large_buffer(self, size: int) -> memoryview:
        if len(self._large) < size:
            self._large = memoryview(bytearray(size))
        return self._large[:size]
