"""Refuses what a peer may not say before the handler sees it: the enforcement of psctl/permits.py on one end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psctl.errors import ConnectionFailed, MessageRefused
from psctl.permits import NEW, Permit, Permits, why_refused
from psctl.types import Role

if TYPE_CHECKING:
    from psctl.transport.peer_connection import ConnectionHandler, PeerConnection


class PermitGate:
    """The handler in front of a handler. A message that no row allows ends the connection with MessageRefused.

    Args:
        permits: the rows.
        me: the receiver's role.
        handler: what allowed messages reach.
    """

    def __init__(self, permits: Permits, me: Role, handler: ConnectionHandler) -> None:
        self._rows, self._handler = permits.to(me), handler
        self._states: dict[PeerConnection, str] = {}

    def on_connected(self, peer: PeerConnection) -> None:
        """A connection is made: its sender's state is new."""
        self._states[peer] = NEW
        self._handler.on_connected(peer)

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Check a message whose payload comes next, before memory is taken for it."""
        self._check(peer, message, size)
        return self._handler.receive_buffer_for(peer, message, size)

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand on a message that is allowed; one with a payload was checked in `place`."""
        row = self._rows[peer.member.role][type(message)] if payload is not None else self._check(peer, message, 0)
        if row.then:
            self._states[peer] = row.then
        self._handler.on_message(peer, message, payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """The connection is over."""
        self._states.pop(peer, None)
        self._handler.on_connection_lost(peer, error)

    def _check(self, peer: PeerConnection, message: Any, size: int) -> Permit:
        member = peer.member
        row = self._rows.get(member.role, {}).get(type(message))
        why = why_refused(row, member, message, self._states[peer], size)
        if why or row is None:
            raise MessageRefused(f"it broke the protocol: {why}", where=str(member))
        return row
