"""TLS over memory, one record at a time, so that the exact byte at which TLS ends and frames begin is known."""

from __future__ import annotations

import ssl
import struct

from psctl.errors import ProtocolError

RECORD = struct.Struct(">BHH")  # type, version, length
MAX_RECORD = RECORD.size + (1 << 14) + 256
TYPES = range(20, 24)  # change_cipher_spec, alert, handshake, application_data


class Records:
    """One end of a TLS session, which consumes whole records and returns bytes to send.

    Args:
        context: made from this member's credentials (transport/credentials.py).
        accepting: whether the other end dialled.
    """

    def __init__(self, context: ssl.SSLContext, *, accepting: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=accepting)

    def release(self) -> None:
        """Release the session's memory."""
        del self._session, self._incoming, self._outgoing

    def take(self, data: memoryview) -> int:
        """Consume the first record of `data` and return its size; 0 when it is not complete yet.

        Raises:
            ProtocolError: the data is not a TLS record.
        """
        if len(data) < RECORD.size:
            if len(data) and data[0] not in TYPES:
                raise ProtocolError("it does not speak TLS")
            return 0
        kind, version, length = RECORD.unpack_from(data)
        if kind not in TYPES or version >> 8 != 3 or length > MAX_RECORD - RECORD.size:
            raise ProtocolError("it does not speak TLS")
        size = RECORD.size + int(length)
        if len(data) < size:
            return 0
        self._incoming.write(data[:size])
        return size

    def outgoing(self) -> bytes:
        """Return the bytes to send now."""
        return self._outgoing.read()

    def handshake(self) -> bool:
        """Continue the handshake; return True when it is complete, False when another record is needed.

        Raises:
            ProtocolError: it failed: the peer's certificate is invalid, or the peer rejected this end's.
        """
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise _fault(error) from error
        return True

    def certificate(self) -> bytes:
        """Return the peer's verified certificate (DER)."""
        der = self._session.getpeercert(binary_form=True)
        if der is None:
            raise ProtocolError("it showed no certificate")
        return der

    def write(self, data: bytes) -> None:
        """Send `data` as one record."""
        assert len(data) <= 1 << 14, "one record holds it"
        self._session.write(data)

    def read(self) -> bytes | None:
        """Return the content of one record, None when another record is needed.

        Raises:
            ProtocolError: the peer ended TLS, or sent an invalid record.
        """
        try:
            data = self._session.read(1 << 14)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            raise ProtocolError("it ended TLS without a reason") from None
        except ssl.SSLError as error:
            raise _fault(error) from error
        if not data:
            raise ProtocolError("it ended TLS without a reason")
        return data


def _fault(error: ssl.SSLError) -> ProtocolError:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProtocolError(f"its certificate is not of this job's authority: {error.verify_message}")
    if "did not return a certificate" in reason:
        return ProtocolError("it showed no certificate")
    if "alert" in reason:
        return ProtocolError(f"it refused our certificate or our TLS: {reason}")
    return ProtocolError(f"the TLS handshake failed: {reason}")
