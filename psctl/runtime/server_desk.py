"""Where a server's workers are served: their connections, the mind, and the locks between.

Locking rule. Each worker's connection has its own reader thread, and all of them feed one mind. The mind guards each
shard, and the ledger of step orders, with a lock of its own; no thread ever holds two. Under a shard's lock run the
sum, the optimizer's step and the choice of what to answer: the thread that brings the missing piece does the work, and
the other threads go on with other shards. Bytes are received into staging buffers under no lock. `_peers` has its own
lock, held for look-ups only. Sending only queues, so nothing ever waits for the network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from psctl.errors import ConnectionFailed, ProtocolError
from psctl.net.peer import Peer
from psctl.store.messages import FromServer, FromWorker
from psctl.store.server import LEDGER, Instruction, Save, ServerMind
from psctl.store.shard import Send

HELD_BACK = 600.0
"""Seconds that a worker which came early waits for the server to know its shards; the coordinator gives up before."""


class Desk:
    """The handler of all workers' connections.

    Args:
        save: called with a checkpoint part, on the thread that made it whole; must not block.
    """

    def __init__(self, save: Callable[[Save], None]) -> None:
        self._save = save
        self._mind: ServerMind | None = None
        self._opened = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}

    def open(self, make: Callable[[Callable[[int], AbstractContextManager[object]]], ServerMind]) -> ServerMind:
        """Make the mind with this desk's locks and begin to serve.

        Args:
            make: called with the mind's `guard`.
        """
        locks: dict[int, threading.Lock] = {LEDGER: threading.Lock()}

        def guard(shard: int) -> AbstractContextManager[object]:
            lock = locks.get(shard)
            if lock is None:  # a shard that is not held here: the mind will say so
                return threading.Lock()
            return lock

        mind = make(guard)
        locks.update({index: threading.Lock() for index in mind.shards})
        self._mind = mind
        self._opened.set()
        return mind

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """Do what the mind said. A worker that is gone misses its message; it asks again when it is back."""
        for instruction in instructions:
            if isinstance(instruction, Save):
                self._save(instruction)
                continue
            peer = self._peer(instruction)
            if peer is not None:
                peer.send(instruction.message, instruction.payload)

    def close(self, reason: str) -> None:
        """End all workers' connections."""
        self._closed = True
        self._opened.set()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(5.0)

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """Hold an early worker back until there is a mind, then let it in."""
        rank = peer.member.rank
        if peer.member.role != "worker":
            raise ProtocolError(f"{peer.member} is no worker")
        mind = self._mind_for(peer)
        with self._lock:
            self._peers[rank] = peer
        self.follow(mind.joined(rank))

    def place(self, peer: Peer, message: FromWorker | FromServer, size: int) -> memoryview | None:
        """Let the mind say where a payload goes."""
        return self._mind_for(peer).place(peer.member.rank, _from_worker(message), size)

    def received(self, peer: Peer, message: FromWorker | FromServer, payload: memoryview | None) -> None:
        """Hand a message to the mind and do what it says."""
        size = 0 if payload is None else len(payload)
        self.follow(self._mind_for(peer).received(peer.member.rank, _from_worker(message), size))

    def lost(self, peer: Peer, error: ConnectionFailed) -> None:
        """Forget a worker that is gone. Whether the job goes on is the coordinator's to say."""
        rank = peer.member.rank
        with self._lock:
            current = self._peers.get(rank) is peer
            if current:
                del self._peers[rank]
        if current and self._mind is not None:
            self._mind.lost(rank)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _peer(self, instruction: Send) -> Peer | None:
        with self._lock:
            return self._peers.get(instruction.rank)

    def _mind_for(self, peer: Peer) -> ServerMind:
        if self._mind is None:
            self._opened.wait(HELD_BACK)
        if self._mind is None or self._closed:
            raise ProtocolError(f"this server serves no one, so not {peer.member} either")
        return self._mind


def _from_worker(message: FromWorker | FromServer) -> FromWorker:
    if isinstance(message, FromServer):
        raise ProtocolError(f"{type(message).__name__} is a server's message")
    return message
