"""What one connection to a server tells the parameter client, on that connection's reader thread; and its silence."""

from __future__ import annotations

from typing import Any, Protocol

from psctl.errors import ConnectionFailed, PeerLost, TimedOut
from psctl.words import ServerAt


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


def silence(
    server: int, at: ServerAt | None, error: ConnectionFailed | None, silent: float, what: str
) -> PeerLost | TimedOut:  # fmt: skip
    """Return the error that ends the wait for a server.

    Args:
        server: its rank.
        at: where it is, if that is known.
        error: why there is no connection to it; None: there is one.
        silent: seconds for which it has said nothing.
        what: it was asked for.
    """
    name, where = f"server/{server}" + (f" at {at.address}" if at is not None else ""), f"server/{server}"
    if error is not None:
        why = f"{name} is lost since {silent:.0f} s, and no other took its place: {error.message}"
        lost = PeerLost(why, where=where)
        lost.__cause__ = error
        return lost
    return TimedOut(
        f"{name} has not said a word for {silent:.0f} s while it was asked for {what}",
        f"look at the log of server/{server}",
        where=where,
    )
