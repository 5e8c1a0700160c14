"""Connections of workers, servers and readers to one server: access, one a member, closing; for both protocols.

A certificate names an incarnation. Only the newest incarnation of a member that is not lost may connect: the
coordinator reports lost workers, and a server that the newest assignment omits is refused. When a member connects
again, its former connection ends, and all of its bytes are processed, before the new connection is used.

Of two servers the one with the higher rank dials (client/server_connections.py); both send on that connection.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from psctl.client.server_connections import Dial, ServerConnections, Unreachable, member_of
from psctl.errors import ConnectionFailed, MessageRefused, ProtocolError
from psctl.job.membership_messages import ProtocolViolation
from psctl.permits import WireMessage
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Member, ServerAt

OPENS_WITHIN = 600.0
"""Seconds that an early connection waits until the server has its shards; the coordinator's own limit is shorter."""

REPLACED_WITHIN = 5.0
"""Seconds that a member's new connection waits for its former one to end."""

FLUSH = 1.0
"""Seconds to send what is queued for other servers when this one ends."""

MemberKey = tuple[str, int]
"""A member without its incarnation: role and rank."""


class PeerConnections(ABC):
    """Handles a server's connections in one protocol, including those that it dialled to other servers.

    A subclass implements the protocol: `start_session`, `end_session`, `receive_buffer_for` and `on_message`; it calls
    `accept_members` for each assignment.

    Args:
        me: this server.
        report: called with each report for the coordinator; must not block.
        dial: connects to other servers; None: there are none.
        unreachable: called for a server that could not be reached.
    """

    def __init__(
        self, me: Member, report: Callable[[ProtocolViolation], object], dial: Dial | None = None,
        unreachable: Unreachable = lambda at, error: None,
    ) -> None:  # fmt: skip
        self.me = me
        self.peers: dict[MemberKey, PeerConnection] = {}
        """The connection in use of each member."""
        self._report = report
        self._closed = False
        self._lock = threading.RLock()
        self._opened = threading.Event()
        self._newest: dict[MemberKey, int] = {}  # incarnation that may connect; those below are lost
        self._servers: set[Member] | None = None  # of the newest assignment; None: there was none
        self._epoch = -1
        self._dialled = ServerConnections(dial, self, unreachable) if dial is not None else None

    # ---- the protocol --------------------------------------------------------------------------------------------

    @abstractmethod
    def start_session(self, peer: PeerConnection) -> None:
        """Call `use`, and send what a new connection needs."""

    @abstractmethod
    def end_session(self, peer: PeerConnection) -> None:
        """Discard the unfinished operations of a connection; the member may connect again."""

    @abstractmethod
    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        """Return the buffer for a payload."""

    @abstractmethod
    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        """Process a message."""

    # ---- members: the coordinator connection's reader thread -----------------------------------------------------

    def accept_members(self, epoch: int, servers: Sequence[ServerAt]) -> bool:
        """Let the servers of a new assignment connect, and end connections of all others.

        Returns:
            False for an assignment that is not newer than the newest.
        """
        alive = {member_of(at) for at in servers}
        with self._lock:
            if epoch <= self._epoch:
                return False
            self._epoch, self._servers = epoch, alive
            for member in alive:
                self._newest[member.role, member.rank] = member.incarnation
            lost = [peer for key, peer in self.peers.items() if key[0] == "server" and peer.member not in alive]
        end_connections(lost)
        return True

    def open(self, servers: Sequence[ServerAt]) -> None:
        """Use connections that waited for the first assignment, and dial the servers of lower rank."""
        self._opened.set()
        if self._dialled is not None:
            self._dialled.assign([at for at in servers if at.rank < self.me.rank])

    def end_worker(self, rank: int, incarnation: int) -> None:
        """Refuse a lost incarnation of a worker, and older ones, from now on, and end its connection."""
        key = ("worker", rank)
        with self._lock:
            self._newest[key] = max(self._newest.get(key, 0), incarnation + 1)
            peer = self.peers.get(key)
        if peer is not None and peer.member.incarnation <= incarnation:
            end_connections([peer])

    def allow(self, member: Member) -> str | None:
        """Return why a member may not connect, None when it may."""
        if member.role not in ("worker", "server", "reader"):
            return f"a server accepts workers, servers and readers, not {member}"
        key = (member.role, member.rank)
        with self._lock:
            newest = self._newest.get(key, 0)
            if member.incarnation < newest:
                return f"incarnation {member.incarnation} of {member} is replaced"
            dropped = self._servers is not None and key in self._newest and member not in self._servers
            if member.role == "server" and member.incarnation == newest and dropped:
                return f"{member} was declared lost"
        return None

    # ---- the handler: each connection's reader thread ------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Wait for the first assignment and for the end of the member's former connection, then use this one."""
        self._opened.wait(OPENS_WITHIN)
        former = self.peers.get((peer.member.role, peer.member.rank))
        if former is not None:
            former.close("you connected again")
            former.join(REPLACED_WITHIN)
        self.start_session(peer)

    def use(self, peer: PeerConnection) -> None:
        """Make a connection the one in use.

        Raises:
            ProtocolError: the member may not connect any more, or the server ends.
        """
        key = (peer.member.role, peer.member.rank)
        with self._lock:
            if not self._opened.is_set() or self._closed:
                raise ProtocolError(f"{self.me} has no shards now, and serves no {peer.member}")
            if key in self.peers:
                raise ProtocolError(f"{peer.member} has another connection, which does not end")
            refusal = self.allow(peer.member)  # it may have been lost since the handshake
            if refusal is not None:
                raise ProtocolError(refusal)
            self.peers[key] = peer

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Remove a lost connection; the coordinator decides whether the job continues."""
        key = (peer.member.role, peer.member.rank)
        if isinstance(error, MessageRefused):
            self._report(ProtocolViolation(peer.member, error.message[:1000]))
        if self.peers.get(key) is peer:
            try:
                self.end_session(peer)  # first: until the key is free no other connection takes its place
            finally:
                with self._lock:
                    del self.peers[key]

    def close(self, reason: str) -> None:
        """End all connections."""
        self._closed = True
        self._opened.set()
        if self._dialled is not None:
            self._dialled.close(reason, FLUSH)
        with self._lock:
            peers = list(self.peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(REPLACED_WITHIN)


def end_connections(peers: Iterable[PeerConnection]) -> None:
    """End connections of lost members, to the last byte."""
    peers = list(peers)
    for peer in peers:
        peer.close("you were declared lost")
    for peer in peers:
        peer.join(REPLACED_WITHIN)
