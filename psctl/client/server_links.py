"""Connections to the servers of the newest assignment, kept up: dialled when it names them, again when they break.

A connection belongs to one incarnation of a server. It is dropped when the assignment no longer names that incarnation;
what is sent to a server without a connection is dropped too, for whoever sends says everything outstanding again when
the server speaks up on a new one. A thread dials for each server that has none, until there is one or it is not wanted
any more: the deadline is its owner's, who waits for something.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from psctl.errors import ConnectionFailed, PsctlError
from psctl.transport.read_lease import ReadLease
from psctl.types import Member, ServerAt

FIRST_PAUSE = 0.05
"""Seconds between the first two attempts to reach a server; each further pause is twice as long."""

LONGEST_PAUSE = 1.0
"""Seconds between two attempts at most."""


class Connection(Protocol):
    """What is needed of a net.peer.Peer."""

    bytes_received: int
    turn: ReadLease

    @property
    def bytes_sent(self) -> int: ...
    def send(self, message: Any, payload: memoryview | None = None, *, urgent: bool = False) -> Any: ...
    def read_here(self, over: Callable[[], bool], seconds: float) -> bool: ...
    def flush(self, timeout: float) -> None: ...
    def close(self, reason: str = "") -> None: ...
    def join(self, timeout: float | None = None) -> bool: ...


def named(at: ServerAt) -> Member:
    """Return a server as certificates name it."""
    return Member("server", at.rank, at.incarnation)


class Links:
    """One process's connections to servers. Its lock is held for look-ups only; calls may come from any thread.

    Args:
        dial: connects, and returns when the connection is made; raises ConnectionFailed. Before it returns, or soon
            after, the connection's handler calls `up`, and at its end `down`.
        unreachable: told once of a server that could not be reached, at the first attempt that failed.
    """

    def __init__(
        self, dial: Callable[[ServerAt], Any], unreachable: Callable[[ServerAt, ConnectionFailed], Any]
    ) -> None:
        self._dial, self._unreachable = dial, unreachable
        self._changed = threading.Condition()
        self._wanted: dict[int, ServerAt] = {}
        self._peers: dict[int, Connection] = {}
        self._dialling: set[ServerAt] = set()
        self._errors: dict[int, ConnectionFailed] = {}
        self._past = 0  # bytes that connections moved which are over
        self._closed = False

    def assigned(self, servers: Sequence[ServerAt]) -> None:
        """Keep connections to these servers from now on, and to no others; those others are over on return."""
        with self._changed:
            before, self._wanted = self._wanted, {at.rank: at for at in servers}
            gone = [self._peers.pop(rank) for rank, at in before.items() if self._unwanted(rank, at)]
            for rank in [rank for rank in self._errors if before.get(rank) != self._wanted.get(rank)]:
                del self._errors[rank]
            for at in servers:
                if before.get(at.rank) != at:
                    self._begin(at)
            self._changed.notify_all()
        for peer in gone:
            peer.close("it is not of the newest assignment")
        for peer in gone:  # what it was receiving goes to places that another may fill now
            peer.join(LONGEST_PAUSE)

    def _unwanted(self, rank: int, at: ServerAt) -> bool:
        return rank in self._peers and self._wanted.get(rank) != at

    def up(self, at: ServerAt, peer: Connection) -> bool:
        """Take in that a connection is made; False when nobody wants it any more."""
        with self._changed:
            if self._closed or self._wanted.get(at.rank) != at or at.rank in self._peers:
                return False
            self._peers[at.rank] = peer
            self._errors.pop(at.rank, None)
            self._changed.notify_all()
            return True

    def down(self, at: ServerAt, peer: Connection, error: ConnectionFailed) -> bool:
        """Take in that a connection is over, and make it again; False when it was not in use."""
        with self._changed:
            self._past += peer.bytes_sent + peer.bytes_received
            if self._peers.get(at.rank) is not peer:
                return False
            del self._peers[at.rank]
            if self._wanted.get(at.rank) == at and not self._closed:
                self._errors[at.rank] = error
                self._begin(at)
                self._changed.notify_all()
            return True

    def serves(self, at: ServerAt, peer: Any) -> bool:
        """Is this the connection in use?"""
        return self._peers.get(at.rank) is peer

    def send(self, server: int, message: Any, payload: memoryview | None = None, *, urgent: bool = False) -> None:
        """Queue a message; dropped when there is no connection."""
        peer = self._peers.get(server)
        if peer is not None:
            peer.send(message, payload, urgent=urgent)

    def take_turn(self, servers: Collection[int]) -> Connection | None:
        """Take the turn to read the connection to one server; None: it is not to be had, or these are several, whose
        connections their own threads read."""
        for server in servers:
            peer = self._peers.get(server)
            if peer is None:
                continue
            if len(servers) == 1 and peer.turn.take():
                return peer
            peer.turn.recall()
        return None

    def error(self, server: int) -> ConnectionFailed | None:
        """Return why there is no connection to a server; None when there is one, or none was tried."""
        return self._errors.get(server)

    def at(self, server: int) -> ServerAt | None:
        """Return where a server is."""
        return self._wanted.get(server)

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""
        with self._changed:
            return self._past + sum(peer.bytes_sent + peer.bytes_received for peer in self._peers.values())

    def flush(self, patience: float) -> None:
        """Let what was queued leave, where that takes no longer than `patience` seconds."""
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            with suppress(PsctlError):  # a connection that breaks now has no one to miss it
                peer.flush(patience)

    def close(self, reason: str, patience: float) -> None:
        """End all connections; what was queued has left first, where that takes no longer than `patience` seconds."""
        with self._changed:
            self._closed = True
            peers = list(self._peers.values())
            self._changed.notify_all()
        self.flush(patience)
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(patience)

    # ---- dialling ------------------------------------------------------------------------------------------------

    def _begin(self, at: ServerAt) -> None:
        if at not in self._dialling and not self._closed:
            self._dialling.add(at)
            threading.Thread(target=self._keep_dialling, args=(at,), name=f"psctl dial {at.rank}", daemon=True).start()

    def _keep_dialling(self, at: ServerAt) -> None:
        pause, told = FIRST_PAUSE, False
        while True:
            before = self._errors.get(at.rank)
            error = self._try(at)
            with self._changed:
                if error is not None and not self._settled(at):
                    self._errors[at.rank] = error
            if error is not None and not told and not self._settled(at):
                told = True
                self._unreachable(at, error)
            with self._changed:
                if error is not None:
                    self._changed.wait_for(lambda: self._settled(at), pause)
                else:
                    self._changed.wait_for(partial(self._came_up, at, before), LONGEST_PAUSE)
                if self._settled(at):
                    self._dialling.discard(at)
                    return
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, at: ServerAt) -> ConnectionFailed | None:
        try:
            self._dial(at)
        except ConnectionFailed as error:
            return error
        return None

    def _came_up(self, at: ServerAt, before: ConnectionFailed | None) -> bool:
        """Whether what was dialled is up, or was and has broken already, with an error that is not that of `before`."""
        return self._settled(at) or self._errors.get(at.rank) not in (None, before)

    def _settled(self, at: ServerAt) -> bool:
        return self._closed or self._wanted.get(at.rank) != at or at.rank in self._peers
