"""Connections of one process to the servers of the newest assignment; a broken one is dialled again.

A connection belongs to one incarnation of a server and is closed when the assignment no longer names that incarnation.
A message to a server without a connection is dropped: its sender sends everything outstanding again when the server
reports on a new connection which shards it leads. Each server without a connection has a thread that dials until there
is one or the assignment drops the server. Dialling has no deadline; a thread that waits for a server has one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from psctl.errors import ConnectionFailed, ProtocolError, PsctlError
from psctl.permits import WireMessage
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.types import Address, Member, PeerBytes, ServerAt, sum_of_bytes

FIRST_PAUSE = 0.05
"""Seconds between the first two attempts to reach a server; each further pause is twice as long."""

LONGEST_PAUSE = 1.0
"""Seconds between two attempts at most. A connection that ended sooner counts as an attempt that failed."""

Dial = Callable[[Member, Address, AnyHandler], object]
"""Connects to (member, address) with a handler, and returns when the connection is made; raises ConnectionFailed."""

Unreachable = Callable[[ServerAt, ConnectionFailed], object]
"""Called once for a server that could not be reached, at the first attempt that failed."""


def member_of(at: ServerAt) -> Member:
    """Return the member that a server's certificate names."""
    return Member("server", at.rank, at.incarnation)


class ServerConnections:
    """One process's connections to servers. Its lock is held for look-ups only; calls may come from any thread.

    This object is the handler of the connections that it dials. It passes messages to `user`, another handler, calls
    `user.on_connected` for each connection of the newest assignment when it is in use, and `user.on_connection_lost`
    for every connection before the server is dialled again.
    """

    def __init__(self, dial: Dial, user: AnyHandler, unreachable: Unreachable) -> None:
        self.receive_buffer_for, self.on_message = user.receive_buffer_for, user.on_message
        self.in_use: dict[int, PeerConnection] = {}
        """By rank of the server."""
        self._dial, self._user, self._unreachable = dial, user, unreachable
        self._changed = threading.Condition()
        self._wanted: dict[int, ServerAt] = {}
        self._dialling: set[ServerAt] = set()
        self._errors: dict[int, ConnectionFailed] = {}
        self._used_since: dict[ServerAt, float] = {}  # monotonic time at which its connection was taken into use
        self._pauses: dict[ServerAt, float] = {}  # seconds before the next attempt, after attempts that failed
        self._open: set[PeerConnection] = set()  # those in use, and those that are being closed
        self._closed_bytes: dict[str, PeerBytes] = {}  # of connections that are closed
        self._closed = False

    def assign(self, servers: Sequence[ServerAt]) -> None:
        """Keep connections to exactly these servers from now on; the other connections have ended on return."""
        with self._changed:
            before, self._wanted = self._wanted, {at.rank: at for at in servers}
            unwanted = [rank for rank, at in before.items() if rank in self.in_use and self._wanted.get(rank) != at]
            dropped = [self.in_use.pop(rank) for rank in unwanted]
            for rank in [rank for rank in self._errors if before.get(rank) != self._wanted.get(rank)]:
                del self._errors[rank]
            for mapping in (self._used_since, self._pauses):
                for at in [at for at in mapping if at not in servers]:
                    del mapping[at]
            for at in servers:
                if before.get(at.rank) != at:
                    self._start_dialling(at)
            self._changed.notify_all()
        for peer in dropped:
            peer.close("it is not of the newest assignment")
        for peer in dropped:  # the buffers that it receives into may be given to another connection now
            peer.join(LONGEST_PAUSE)

    def is_in_use(self, peer: PeerConnection) -> bool:
        """Is this the connection in use to its server?"""
        return self.in_use.get(peer.member.rank) is peer

    def send(
        self, server: int, message: WireMessage, payload: memoryview | None = None, *, urgent: bool = False
    ) -> None:
        """Queue a message; dropped when there is no connection."""
        peer = self.in_use.get(server)
        if peer is not None:
            peer.send(message, payload, urgent=urgent)

    def acquire_read_lease(self, servers: Collection[int]) -> PeerConnection | None:
        """Take the lease to read the connection to the only server of `servers`.

        Returns:
            None where there are several servers, or the lease is taken: their reader threads read.
        """
        for server in servers:
            peer = self.in_use.get(server)
            if peer is None:
                continue
            if len(servers) == 1 and peer.read_lease.try_acquire():
                return peer
            peer.read_lease.recall()
        return None

    def error(self, server: int) -> ConnectionFailed | None:
        """Return why there is no connection to a server; None when there is one, or no attempt has failed."""
        return self._errors.get(server)

    def name_of(self, server: int) -> str:
        """Return a server with its address, for messages."""
        at = self._wanted.get(server)
        return f"server/{server} at {at.address}" if at is not None else f"server/{server}"

    @property
    def bytes_by_peer(self) -> dict[str, PeerBytes]:
        """Bytes sent to each server and received from it so far; never less than before."""
        with self._changed:
            return sum_of_bytes(self._closed_bytes, *map(_bytes_of, self._open))

    def flush(self, patience: float) -> None:
        """Wait until all that was queued has been sent, for at most `patience` seconds."""
        with self._changed:
            peers = list(self.in_use.values())
        for peer in peers:
            with suppress(PsctlError):  # the caller ends: a connection that breaks now is not needed any more
                peer.flush(patience)

    def stop_dialling(self) -> None:
        """Stop dialling servers; connections stay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, reason: str, patience: float) -> None:
        """End all connections, after at most `patience` seconds for each to send what was queued."""
        self.stop_dialling()
        peers = list(self.in_use.values())
        self.flush(patience)
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(patience)

    # ---- the handler: each connection's reader thread ------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Take a connection into use.

        Raises:
            ProtocolError: the newest assignment does not name that incarnation, or it has a connection.
        """
        rank = peer.member.rank
        with self._changed:
            at = self._wanted.get(rank)
            if self._closed or at is None or member_of(at) != peer.member or rank in self.in_use:
                raise ProtocolError(f"{peer.member} is not of the newest assignment, or has a connection already")
            self.in_use[rank] = peer
            self._open.add(peer)
            self._used_since[at] = time.monotonic()
            self._errors.pop(rank, None)
            self._changed.notify_all()
        self._user.on_connected(peer)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Dial again where the connection was in use."""
        self._user.on_connection_lost(peer, error)
        rank = peer.member.rank
        with self._changed:
            self._open.discard(peer)
            self._closed_bytes = sum_of_bytes(self._closed_bytes, _bytes_of(peer))
            if self.in_use.get(rank) is not peer:
                return
            del self.in_use[rank]
            at = self._wanted.get(rank)
            if at is not None and not self._closed:
                self._errors[rank] = error
                if time.monotonic() - self._used_since.pop(at) < LONGEST_PAUSE:
                    self._lengthen_pause(at)
                else:
                    self._pauses.pop(at, None)
                self._start_dialling(at)
                self._changed.notify_all()

    # ---- dialling ------------------------------------------------------------------------------------------------

    def _start_dialling(self, at: ServerAt) -> None:
        if at not in self._dialling and not self._closed:
            self._dialling.add(at)
            threading.Thread(target=self._keep_dialling, args=(at,), name=f"psctl dial {at.rank}", daemon=True).start()

    def _keep_dialling(self, at: ServerAt) -> None:
        reported = False
        while True:
            with self._changed:
                if self._changed.wait_for(partial(self._is_settled, at), self._pauses.get(at, 0.0)):
                    self._dialling.discard(at)
                    return
            before, error = self._errors.get(at.rank), None
            try:
                self._dial(member_of(at), at.address, self)
            except ConnectionFailed as failed:
                error = failed
            with self._changed:
                failing = error is not None and not self._is_settled(at)
                if failing and error is not None:
                    self._errors[at.rank] = error
                    self._lengthen_pause(at)
            if failing and error is not None and not reported:
                reported = True
                self._unreachable(at, error)
            if error is None:  # `on_connected` follows on the reader thread
                with self._changed:
                    self._changed.wait_for(partial(self._came_up, at, before), LONGEST_PAUSE)

    def _lengthen_pause(self, at: ServerAt) -> None:
        self._pauses[at] = min(2 * self._pauses.get(at, FIRST_PAUSE / 2), LONGEST_PAUSE)

    def _came_up(self, at: ServerAt, before: ConnectionFailed | None) -> bool:
        """Is the dialled connection in use, or was and has broken already, with an error that is not `before`?"""
        return self._is_settled(at) or self._errors.get(at.rank) not in (None, before)

    def _is_settled(self, at: ServerAt) -> bool:
        return self._closed or self._wanted.get(at.rank) != at or at.rank in self.in_use


def _bytes_of(peer: PeerConnection) -> dict[str, PeerBytes]:
    return {str(peer.member): PeerBytes(peer.bytes_sent, peer.bytes_received)}
