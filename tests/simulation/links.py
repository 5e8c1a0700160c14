"""A process's connections to servers, kept up as client/server_connections.py keeps them, without its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psctl.errors import ConnectionFailed
from psctl.types import Member, ServerAt
from tests.simulation.kernel import Process
from tests.simulation.network import End, Network

PAUSE = 0.05
"""Seconds between two attempts to reach a server."""


class User(Protocol):
    """Whose connections they are."""

    def up(self, at: ServerAt, peer: End) -> None: ...
    def down(self, at: ServerAt) -> None: ...
    def place_from(self, at: ServerAt, message: Any, size: int) -> memoryview | None: ...
    def received_from(self, at: ServerAt, message: Any, size: int) -> None: ...
    def unreachable(self, at: ServerAt, why: str) -> None: ...


class Links:
    """Connections to the servers of the newest assignment that `wanted` picks."""

    def __init__(self, process: Process, network: Network, user: User, wanted: Callable[[ServerAt], bool]) -> None:
        self.process, self.network, self.user = process, network, user
        self._wanted = wanted
        self._links: dict[int, Link] = {}

    def assigned(self, servers: Sequence[ServerAt]) -> None:
        """Keep connections to these and no others."""
        want = {at.rank: at for at in servers if self._wanted(at)}
        for rank, link in list(self._links.items()):
            if want.get(rank) != link.at:
                del self._links[rank]
                link.over()
        for rank, at in want.items():
            if rank not in self._links:
                self._links[rank] = Link(self, at)

    def send(self, server: int, message: Any, payload: memoryview | None = None) -> None:
        """Queue a message; dropped when there is no connection."""
        link = self._links.get(server)
        if link is not None and link.end is not None:
            link.end.send(message, payload)

    def away(self) -> str:
        """Say to whom there is no connection."""
        away = [f"server/{rank}" for rank, link in self._links.items() if link.end is None]
        return f" (no connection to {', '.join(away)})" if away else ""

    def close(self) -> None:
        """End all; what was queued leaves first."""
        for link in self._links.values():
            link.closed = True
            if link.end is not None:
                link.end.close("it is over")


class Link:
    """One of them, and the handler of its connections."""

    def __init__(self, links: Links, at: ServerAt) -> None:
        self._links, self.at = links, at
        self.end: End | None = None
        self.closed = self._told = False
        self._dial()

    def over(self) -> None:
        """Nobody wants it any more: it ends to the last byte."""
        self.closed = True
        if self.end is not None:
            end, self.end = self.end, None
            end.drop("it is not of the newest assignment")
            self._links.user.down(self.at)

    def _dial(self) -> None:
        links = self._links
        member = Member("server", self.at.rank, self.at.incarnation)
        links.network.dial(links.process, self.at.address, member, self, self._failed)

    def _failed(self, why: str) -> None:
        if not self._told and not self.closed:
            self._told = True
            self._links.user.unreachable(self.at, why)
        self._later()

    def _later(self) -> None:
        process = self._links.process
        process.world.after(PAUSE, lambda: self._dial() if process.alive and not self.closed else None)

    def on_connected(self, peer: End) -> None:
        if self.closed:
            peer.drop("it is not of the newest assignment")
            return
        self.end = peer
        self._links.user.up(self.at, peer)

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self._links.user.place_from(self.at, message, size) if self.end is peer else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self.end is peer:
            self._links.user.received_from(self.at, message, 0 if payload is None else len(payload))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self.end is not peer:
            return
        self.end = None
        self._links.user.down(self.at)
        if not self.closed:
            self._later()
