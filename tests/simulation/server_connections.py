"""A process's connections to servers: psctl/client/server_connections.py without its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psctl.errors import ConnectionFailed
from psctl.types import Member, ServerAt
from tests.simulation.kernel import Process
from tests.simulation.network import End, Network

RETRY_DELAY = 0.05
"""Seconds between two attempts to reach a server."""


class ServerConnectionsUser(Protocol):
    """The owner of the connections."""

    def on_server_connected(self, at: ServerAt, peer: End) -> None: ...
    def on_server_disconnected(self, at: ServerAt) -> None: ...
    def server_buffer_for(self, at: ServerAt, message: Any, size: int) -> memoryview | None: ...
    def on_server_message_from(self, at: ServerAt, message: Any, size: int) -> None: ...
    def on_server_unreachable(self, at: ServerAt, why: str) -> None: ...


class ServerConnections:
    """Connections to those servers of the newest assignment for which `wanted` returns True."""

    def __init__(
        self, process: Process, network: Network, user: ServerConnectionsUser, wanted: Callable[[ServerAt], bool]
    ) -> None:
        self.process, self.network, self.user = process, network, user
        self._wanted = wanted
        self._connections: dict[int, ServerConnection] = {}

    def set_servers(self, servers: Sequence[ServerAt]) -> None:
        """Connect to these servers and close all other connections."""
        want = {at.rank: at for at in servers if self._wanted(at)}
        for rank, connection in list(self._connections.items()):
            if want.get(rank) != connection.at:
                del self._connections[rank]
                connection.stop()
        for rank, at in want.items():
            if rank not in self._connections:
                self._connections[rank] = ServerConnection(self, at)

    def send(self, server: int, message: Any, payload: memoryview | None = None) -> None:
        """Queue a message; dropped when there is no connection."""
        connection = self._connections.get(server)
        if connection is not None and connection.end is not None:
            connection.end.send(message, payload)

    def disconnected(self) -> str:
        """Return the servers without a connection, as a suffix of a message."""
        disconnected = [f"server/{rank}" for rank, connection in self._connections.items() if connection.end is None]
        return f" (no connection to {', '.join(disconnected)})" if disconnected else ""

    def close(self) -> None:
        """Close all connections after the queued messages are sent."""
        for connection in self._connections.values():
            connection.closed = True
            if connection.end is not None:
                connection.end.close("it is stop")


class ServerConnection:
    """A connection to one server, dialled again when it breaks; the handler of its ends."""

    def __init__(self, connections: ServerConnections, at: ServerAt) -> None:
        self._connections, self.at = connections, at
        self.end: End | None = None
        self.closed = self._reported = False
        self._dial()

    def stop(self) -> None:
        """Drop the connection: the server is not in the newest assignment."""
        self.closed = True
        if self.end is not None:
            end, self.end = self.end, None
            end.drop("it is not of the newest assignment")
            self._connections.user.on_server_disconnected(self.at)

    def _dial(self) -> None:
        connections = self._connections
        member = Member("server", self.at.rank, self.at.incarnation)
        connections.network.dial(connections.process, self.at.address, member, self, self._failed)

    def _failed(self, why: str) -> None:
        if not self._reported and not self.closed:
            self._reported = True
            self._connections.user.on_server_unreachable(self.at, why)
        self._retry()

    def _retry(self) -> None:
        process = self._connections.process
        process.world.after(RETRY_DELAY, lambda: self._dial() if process.alive and not self.closed else None)

    def on_connected(self, peer: End) -> None:
        if self.closed:
            peer.drop("it is not of the newest assignment")
            return
        self.end = peer
        self._connections.user.on_server_connected(self.at, peer)

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self._connections.user.server_buffer_for(self.at, message, size) if self.end is peer else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self.end is peer:
            self._connections.user.on_server_message_from(self.at, message, 0 if payload is None else len(payload))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self.end is not peer:
            return
        self.end = None
        self._connections.user.on_server_disconnected(self.at)
        if not self.closed:
            self._retry()
