"""What one connection to a server tells the parameter client, on the thread that reads that connection."""

from __future__ import annotations

from typing import Any, Protocol

from psctl.errors import ConnectionFailed
from psctl.types import ServerAt


class Client(Protocol):
    """Whom it is told to."""

    def joined(self, at: ServerAt, peer: Any) -> None: ...
    def place(self, at: ServerAt, peer: Any, message: Any, size: int) -> memoryview | None: ...
    def received(self, at: ServerAt, peer: Any, message: Any, payload: memoryview | None) -> None: ...
    def lost(self, at: ServerAt, peer: Any, error: ConnectionFailed) -> None: ...


class Heard:
    """The handler of the connection to one server of an assignment."""

    def __init__(self, client: Client, at: ServerAt) -> None:
        self._client, self._at = client, at

    def joined(self, peer: Any) -> None:
        self._client.joined(self._at, peer)

    def place(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return self._client.place(self._at, peer, message, size)

    def received(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self._client.received(self._at, peer, message, payload)

    def lost(self, peer: Any, error: ConnectionFailed) -> None:
        self._client.lost(self._at, peer, error)
