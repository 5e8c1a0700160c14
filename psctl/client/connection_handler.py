"""What one connection to a server tells the parameter client, on the thread that reads that connection."""

from __future__ import annotations

from typing import Any, Protocol

from psctl.errors import ConnectionFailed
from psctl.types import ServerAt


class Client(Protocol):
    """Whom it is told to."""

    def on_connected(self, at: ServerAt, peer: Any) -> None: ...
    def receive_buffer_for(self, at: ServerAt, peer: Any, message: Any, size: int) -> memoryview | None: ...
    def on_message(self, at: ServerAt, peer: Any, message: Any, payload: memoryview | None) -> None: ...
    def on_connection_lost(self, at: ServerAt, peer: Any, error: ConnectionFailed) -> None: ...


class Heard:
    """The handler of the connection to one server of an assignment."""

    def __init__(self, client: Client, at: ServerAt) -> None:
        self._client, self._at = client, at

    def on_connected(self, peer: Any) -> None:
        self._client.on_connected(self._at, peer)

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return self._client.receive_buffer_for(self._at, peer, message, size)

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self._client.on_message(self._at, peer, message, payload)

    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None:
        self._client.on_connection_lost(self._at, peer, error)
