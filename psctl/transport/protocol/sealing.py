"""AES-256-GCM for one direction of a connection: a counter as nonce, fresh keys, the next key by a ratchet.

Each direction has its own key, so the nonce is the number of the seal alone. Both ends count; the number is not sent.
A seal that is missing, repeated, out of order or changed in one bit therefore fails to open. After REKEY seals both
ends replace the key by one derived from it, from which the old key cannot be computed. A seal has at most 1 MiB, so a
key encrypts at most 2^32 blocks, below the 2^34.5 at which TLS 1.3 must change keys (RFC 8446, 5.5).
"""

from __future__ import annotations

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
