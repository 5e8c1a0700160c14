"""Frames: a fixed prefix with lengths, a sealed header, a sealed payload; or the same without seals.

    kind 1 | bytes of header 4 | bytes of payload 4 | header sealed (+16) | payload sealed (+16)
    kind 1 | bytes of header 4 | bytes of payload 4 | header and payload sealed (+16), where both have JOINT at most

The prefix is associated data of every seal. Lengths are checked against the limits before they are used. A short header
and payload have one seal together: a seal costs a microsecond and releases the interpreter's lock, a copy costs less.
In longer frames an empty part has no seal. Kinds:

    MESSAGE  a message of the application and its payload
    FIRST    a message whose payload continues in PIECEs; its header follows the whole payload's size in 8 bytes
    PIECE    payload only: the next bytes of the message that a FIRST began or a Long announced
    CONTROL  a message of the connection, without payload

A seal is AES-256-GCM. Each direction has its own key, so the nonce is the number of the seal alone. Both ends count;
the number is not sent. A seal that is missing, repeated, out of order or changed in one bit therefore fails to open.
After REKEY seals both ends replace the key by one derived from it, from which the old key cannot be computed. A seal
has at most 1 MiB, so a key encrypts at most 2^32 blocks, below the 2^34.5 at which TLS 1.3 must change keys (RFC 8446,
5.5).

Open frames (`network.encryption: off`) have the same prefix, header and payload without seals. Both ends prove their
identity before the first one; nothing protects what follows. A long payload is sent from where it lies and received
where it goes. Windows count open frames as if they were sealed.
"""

from __future__ import annotations

import struct

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from psctl.errors import ProtocolError
from psctl.types import Member

Bytes = bytes | bytearray | memoryview
TAG = 16
"""Bytes that a seal adds."""
KEY = 32
REKEY = 1 << 16

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
DIRECT = 16 << 10
"""Bytes of payload from which on an open frame is not copied."""
JOINT = 16 << 10
"""Bytes of header and payload up to which a frame has one seal."""

_KINDS = (MESSAGE, CONTROL, PIECE, FIRST)

Prefix = tuple[int, int, int, int]
"""The decoded prefix of a frame: kind, bytes of header, bytes of payload, bytes of the whole frame."""


def derive(key: bytes, job: str, sender: Member, receiver: Member, connection: bytes) -> bytes:
    """Return the secret of one direction: the sent key bound to the job, both members and the connection's id."""
    assert len(key) == KEY, "a data key has 256 bits"
    names = [[m.role, m.rank, m.incarnation] for m in (sender, receiver)]
    info = msgspec.msgpack.encode(["psctl data key", job, *names])
    return HKDF(hashes.SHA256(), KEY, salt=connection, info=info).derive(key)


class Cipher:
    """Seals or opens the data of one direction, in order; one object at each end.

    Args:
        secret: 32 bytes that only the two ends have.
        rekey: number of seals after which the next key is used; both ends must agree.
    """

    def __init__(self, secret: bytes, rekey: int = REKEY) -> None:
        self._rekey = rekey
        self._use(secret)

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        self._gcm = AESGCM(secret)
        self._count = 0

    def _next_key(self) -> None:
        self._use(HKDFExpand(hashes.SHA256(), KEY, info=b"psctl next key").derive(self._secret))

    def seal(self, data: Bytes, associated: Bytes, out: memoryview) -> None:
        """Write `data` sealed into `out`, which is TAG bytes longer; `associated` is authenticated with it."""
        if self._count == self._rekey:
            self._next_key()  # before the count is used: a key must never be used with a nonce twice
        self._count += 1
        self._gcm.encrypt_into(self._count.to_bytes(12, "big"), data, associated, out)

    def open(self, data: Bytes, associated: Bytes, out: memoryview) -> None:
        """Decrypt the seal `data` into `out`, which is TAG bytes shorter.

        Raises:
            ProtocolError: it is not the next seal of the other end; the content of `out` is invalid then.
        """
        if self._count == self._rekey:
            self._next_key()
        self._count += 1
        try:
            self._gcm.decrypt_into(self._count.to_bytes(12, "big"), data, associated, out)
        except InvalidTag:
            raise ProtocolError("a frame fails its check: changed, repeated, or out of order") from None


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


def write_open_frame(kind: int, header: Bytes, payload: Bytes, out: memoryview) -> int:
    """Write one frame without seals into the start of `out` and return its size in bytes."""
    start = PREFIX.size
    out[:start] = PREFIX.pack(kind, len(header), len(payload))
    for part in (header, payload):
        end = start + len(part)
        out[start:end] = part
        start = end
    return start


class OpenFrames:
    """Reads open frames, as FrameOpener reads sealed ones."""

    def header(self, prefix: Prefix, frame: memoryview) -> memoryview:
        """Return the header of a frame; it is valid until the next one."""
        return frame[PREFIX.size : PREFIX.size + prefix[1]]

    def payload(self, prefix: Prefix, frame: memoryview, into: memoryview | None) -> memoryview:
        """Copy the payload into `into`, which has exactly its size, and return it; None: return it where it is."""
        data = frame[PREFIX.size + prefix[1] :]
        if into is None:
            return data
        into[:] = data
        return into

    def piece(self, frame: memoryview, into: memoryview) -> None:
        """Copy the payload of a PIECE into `into`."""
        into[:] = frame[PREFIX.size :]


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
