"""Certificates that live for days, in jobs that run for months: the coordinator issues another one before one ends.

Only handshakes look at a certificate, so a connection outlives it. A new one travels over the member's sealed
connection to the coordinator and is used by whatever the process connects or accepts from then on. Half of a life is
left when it is issued: a member that is away for days (its agent would end it long before) still has a valid one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from psctl.errors import ConnectionFailed
from psctl.job.process_messages import NewCertificate
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.transport.protocol.authority import LIFE
from psctl.types import Member


class Renewals:
    """Which members need a new certificate; the coordinator's part.

    Args:
        start: time.time() at which all that is not `issued` here was issued.
        life: seconds for which certificates are valid.
    """

    def __init__(self, start: float, life: float = LIFE) -> None:
        self._start, self._life = start, life
        self._issued: dict[Member, float] = {}

    def issued(self, member: Member, now: float) -> None:
        """Note that a member's certificate was issued."""
        self._issued[member] = now

    def due(self, connected: Iterable[Member], now: float) -> list[Member]:
        """Return those of the connected members of whose certificate less than half of its life is left."""
        return [each for each in connected if now - self._issued.get(each, self._start) > self._life / 2]


class CertificateRenewer:
    """The handler in front of a process's connection to the coordinator: takes new certificates, hands on the rest."""

    def __init__(self, credentials: Credentials, handler: ConnectionHandler, say: Callable[[str], None]) -> None:
        self._credentials, self._handler, self._say = credentials, handler, say

    def on_connected(self, peer: PeerConnection) -> None:
        """The connection is made."""
        self._handler.on_connected(peer)

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Return where a payload goes."""
        return self._handler.receive_buffer_for(peer, message, size)

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Use a new certificate; hand on every other message."""
        if isinstance(message, NewCertificate):
            self._credentials.renew(message.certificate, message.key)
            self._say(f"psctl: {self._credentials.member} has a new certificate since {time.strftime('%F %T')}")
        else:
            self._handler.on_message(peer, message, payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """The connection is over."""
        self._handler.on_connection_lost(peer, error)
