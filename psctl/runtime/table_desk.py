"""Where a server's tables are served: workers' connections to them, and the one mind behind.

These connections are beside those of the dense store: a script that never asks for a store has none. All reader threads
feed the mind under one lock, and queue what it answers under the same lock, so that answers leave in the order in which
they were made. Payloads are received into buffers of their own under no lock.
"""

from __future__ import annotations

import threading

from psctl.errors import ConnectionFailed, ProtocolError
from psctl.net.peer import Peer
from psctl.runtime.functions import JobFunctions
from psctl.store.table import Send, TableMind
from psctl.store.table_messages import FromWorker
from psctl.store.table_packing import Assembly, in_parts


class TableDesk:
    """The handler of all workers' connections to one server's tables.

    Args:
        rank: this server's.
    """

    def __init__(self, rank: int) -> None:
        self._mind = TableMind(rank, JobFunctions())
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._parts: dict[Peer, Assembly] = {}

    def close(self, reason: str) -> None:
        """End all connections."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(5.0)

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """A worker is there (again): what an older connection of its asked for is forgotten."""
        with self._lock:
            self._mind.lost(peer.member.rank)
            self._peers[peer.member.rank] = peer
            self._parts[peer] = Assembly()

    def place(self, peer: Peer, message: object, size: int) -> memoryview | None:
        """Payloads gather in a buffer a message."""
        return self._parts[peer].place(message, size)

    def received(self, peer: Peer, message: object, payload: memoryview | None) -> None:
        """Hand a whole message to the mind and do what it says."""
        if not isinstance(message, FromWorker):
            raise ProtocolError(f"{type(message).__name__} is a server's message")
        whole = self._parts[peer].received(message, 0 if payload is None else len(payload))
        if whole is None:
            return
        with self._lock:
            if self._peers.get(peer.member.rank) is not peer:
                return
            for send in self._mind.received(peer.member.rank, *whole):
                self._send(send)

    def lost(self, peer: Peer, error: ConnectionFailed) -> None:
        """Forget a connection; what came by it stays."""
        with self._lock:
            self._parts.pop(peer, None)
            if self._peers.get(peer.member.rank) is peer:
                del self._peers[peer.member.rank]
                self._mind.lost(peer.member.rank)

    def _send(self, send: Send) -> None:
        peer = self._peers.get(send.worker)
        if peer is not None:
            for message, payload in in_parts(send.message, send.payload):
                peer.send(message, payload)
