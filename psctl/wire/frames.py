"""Frames: a fixed prefix with lengths, a sealed header, a sealed payload.

    kind 1 | bytes of header 4 | bytes of payload 4 | header sealed (+16) | payload sealed (+16)

The prefix is associated data of both seals. Lengths are checked against the limits before anything is done with them.
An empty part has no seal. Kinds: MESSAGE holds a message of the application and its payload; CONTROL one of the
connection, never with a payload; PIECE only a payload, the next bytes of the message that a Long announced.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from psctl.errors import ProtocolError
from psctl.wire.sealing import TAG, Bytes, Cipher

MESSAGE, CONTROL, PIECE = 1, 2, 3
PREFIX = struct.Struct(">BII")

MAX_PAYLOAD = 1 << 20
"""Bytes of payload that a message may have; senders cut at 512 KiB."""
MAX_HEADER = 16 << 20
"""Bytes of header that a message may have, in pieces."""
FRAME_HEADER = 64 << 10
"""Bytes of header that one frame may have."""
COST = 512
"""What a frame takes of a window beyond its bytes: the kernel's own bookkeeping counts against a socket's buffer."""


class Prefix(NamedTuple):
    """What the first bytes of a frame say."""

    kind: int
    header: int
    payload: int

    @property
    def size(self) -> int:
        """Bytes of the whole frame on the wire."""
        return frame_size(self.header, self.payload)


def frame_size(header: int, payload: int) -> int:
    """Return the bytes on the wire of a frame with so many bytes of header and payload."""
    return PREFIX.size + (header + TAG if header else 0) + (payload + TAG if payload else 0)


def read_prefix(data: Bytes) -> Prefix:
    """Return the prefix at the start of `data`, its lengths checked.

    Raises:
        ProtocolError: unknown kind, or a length that its kind may not have.
    """
    prefix = Prefix._make(PREFIX.unpack_from(data))
    kind, header, payload = prefix
    if kind not in (MESSAGE, CONTROL, PIECE):
        raise ProtocolError(f"it sent a frame of unknown kind {kind}")
    if header > FRAME_HEADER or payload > MAX_PAYLOAD:
        raise ProtocolError(f"it sent an oversized frame: {header} bytes of header, {payload} of payload")
    if (header == 0) != (kind == PIECE) or (payload == 0 and kind == PIECE) or (payload and kind == CONTROL):
        raise ProtocolError(f"it sent a frame of kind {kind} with {header} bytes of header, {payload} of payload")
    return prefix


def write_frame(cipher: Cipher, kind: int, header: Bytes, payload: Bytes, out: memoryview) -> int:
    """Seal one frame into the start of `out` and return its size in bytes."""
    PREFIX.pack_into(out, 0, kind, len(header), len(payload))
    prefix = bytes(out[: PREFIX.size])
    end = PREFIX.size
    for part in (header, payload):
        if len(part):
            start, end = end, end + len(part) + TAG
            cipher.seal(part, prefix, out[start:end])
    return end


def open_header(cipher: Cipher, prefix: Prefix, frame: memoryview) -> bytearray:
    """Return the header of a whole frame; to be called before `open_payload`.

    Raises:
        ProtocolError: the seal does not hold.
    """
    header = bytearray(prefix.header)
    if prefix.header:
        end = PREFIX.size + prefix.header + TAG
        cipher.open(frame[PREFIX.size : end], bytes(frame[: PREFIX.size]), memoryview(header))
    return header


def open_payload(cipher: Cipher, prefix: Prefix, frame: memoryview, into: memoryview) -> None:
    """Open the payload of a whole frame straight into `into`, which has exactly its size.

    Raises:
        ProtocolError: the seal does not hold.
    """
    start = prefix.size - prefix.payload - TAG
    cipher.open(frame[start : prefix.size], bytes(frame[: PREFIX.size]), into)
