"""A handler that checks the permits of messages, as PeerConnection does, for tests without connections."""

from __future__ import annotations

from typing import Any

from psctl.errors import ConnectionFailed
from psctl.permits import Permits, SenderPermits
from psctl.types import Role


class PermitChecks:
    """Passes permitted messages to a handler.

    Args:
        permits: the permits of all messages.
        receiver: the role of this end.
        handler: receives the permitted messages.
    """

    def __init__(self, permits: Permits, receiver: Role, handler: Any) -> None:
        self._permits, self._receiver, self._handler = permits, receiver, handler
        self.of: dict[Any, SenderPermits] = {}
        """By peer."""

    def on_connected(self, peer: Any) -> None:
        self.of[peer] = SenderPermits(self._permits, self._receiver, peer.member)
        self._handler.on_connected(peer)

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        self.of[peer].check(message, size)
        return self._handler.receive_buffer_for(peer, message, size)

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self.of[peer].admit(message, checked=payload is not None)
        self._handler.on_message(peer, message, payload)

    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None:
        self.of.pop(peer, None)
        self._handler.on_connection_lost(peer, error)
