"""Renewal of certificates: they are valid for days, jobs run for months, so the coordinator issues new ones in time.

Only handshakes check a certificate, so a connection may last longer than its certificate. A new one is sent over the
member's sealed connection to the coordinator and is used for all later connections of the process. It is issued when
half of the old one's validity is left: a member that is unreachable for days (its agent would end it long before) still
has a valid one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from psctl.job.process_messages import NewCertificate
from psctl.permits import WireMessage
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.transport.protocol.authority import LIFE
from psctl.types import Member


class Renewals:
    """Keeps the coordinator's times of issue, and finds the members that need a new certificate.

    Args:
        start: time.time() of the first certificates, for members without a call of `issued`.
        life: seconds for which certificates are valid.
    """

    def __init__(self, start: float, life: float = LIFE) -> None:
        self._start = start
        self._life = life
        self._issued: dict[Member, float] = {}

    def issued(self, member: Member, now: float) -> None:
        """Record that a certificate was issued to a member at time `now`."""
        self._issued[member] = now

    def due(self, connected: Iterable[Member], now: float) -> list[Member]:
        """Return the connected members whose certificates have less than half of their validity left."""
        return [each for each in connected if now - self._issued.get(each, self._start) > self._life / 2]


class CertificateRenewer:
    """A handler of the connection to the coordinator: uses new certificates, forwards all other events to `handler`.

    Args:
        credentials: this process's, which get the new certificates.
        handler: handles all other messages and events.
        log: takes a line about each renewal.
    """

    def __init__(self, credentials: Credentials, handler: AnyHandler, log: Callable[[str], None]) -> None:
        self._credentials = credentials
        self._on_message = handler.on_message
        self._log = log
        self.on_connected, self.on_connection_lost = handler.on_connected, handler.on_connection_lost
        self.receive_buffer_for = handler.receive_buffer_for

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        """Use a new certificate; forward every other message."""
        if isinstance(message, NewCertificate):
            self._credentials.renew(message.certificate, message.key)
            self._log(f"psctl: {self._credentials.member} has a new certificate since {time.strftime('%F %T')}")
        else:
            self._on_message(peer, message, payload)
