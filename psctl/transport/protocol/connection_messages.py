"""Messages about a connection itself, between its two ends; the application's messages are another union.

Keys and Refused travel inside TLS, once each way. Credit, Bye and Long travel in frames.
"""

from __future__ import annotations

import msgspec

from psctl.types import Member

PROTOCOL = 14
"""Number of this protocol; ends that differ refuse each other."""


class KeyExchange(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The last message inside TLS: the data key of the sender's direction, and what it is bound to."""

    protocol: int
    job: str
    sender: Member
    receiver: Member
    key: bytes  # 32 fresh random bytes
    connection: bytes  # 16 fresh random bytes; both halves together are the connection's id
    window: int  # bytes that the sender of this message can hold unread
    sealed: bool  # whether frames are encrypted; both ends must agree

    def __repr__(self) -> str:
        return f"Keys({self.sender} to {self.receiver}, key: hidden)"


class ConnectionRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Sent in place of Keys: the peer's identity is valid, but its connection is refused."""

    reason: str


class Credit(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver has read so many bytes more; as many may be sent."""

    bytes: int


class Bye(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The last frame of an orderly end."""

    reason: str


class Long(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message with a header too long for one frame follows in pieces: first of its header, then of its payload."""

    header: int
    payload: int
