"""Connections between workers of one rack that sum their gradients and forward values; made again after a loss.

Each worker listens, and reports its address to the coordinator, which sends each worker the others of its rack; of two
the one with the higher rank dials. The certificates of the job authenticate both ends. No operation waits for a
connection: without one a worker pushes and pulls alone. A broken connection is dialled again as long as the coordinator
names its worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from psctl.errors import ConnectionFailed
from psctl.job.training_messages import WorkerAt
from psctl.permits import WireMessage
from psctl.ps.messages import BetweenPeers
from psctl.ps.pieces import bytes_view
from psctl.transport.connect import Acceptor, Allow
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.types import Address, Member

PAUSE = 0.05
"""Seconds between the first two attempts to dial a worker; each further pause is twice as long."""

LONGEST = 1.0
"""Seconds between two attempts at most."""

Dial = Callable[[Member, Address, AnyHandler], object]
"""Connects to (member, address) with a handler; raises ConnectionFailed."""

Listen = Callable[[AnyHandler, Allow], Acceptor]
"""Listens, with a handler for connections and a function that admits members."""


class RackMessages(Protocol):
    """Called on the reading threads of connections."""

    def on_connected(self, member: Member) -> None: ...
    def on_bytes(self, member: Member, message: BetweenPeers, data: memoryview | None) -> None: ...
    def on_connection_lost(self, member: Member) -> None: ...


class RackConnections:
    """One worker's connections. `send` and `connect` may be called by any thread.

    Args:
        me: this worker.
        dial: connects to a worker.
        listen: makes the listener.
        most: bytes of the largest shard.
        handler: called for connections and messages.
    """

    secret = b""
    """No secret: certificates authenticate the workers."""

    def __init__(self, me: Member, dial: Dial, listen: Listen, most: int, handler: RackMessages) -> None:
        self._me, self._dial, self._most, self._handler = me, dial, most, handler
        self._lock = threading.Lock()
        self._known: dict[int, WorkerAt] = {}
        self._peers: dict[int, PeerConnection] = {}
        self._closed = threading.Event()
        self._acceptor = listen(self, self._why_refused)
        self.address: Address | None = self._acceptor.address
        """Where the others dial."""

    def connect(self, workers: Sequence[WorkerAt]) -> None:
        """Connect to each of these workers; connections to earlier processes of theirs are closed."""
        with self._lock:
            new = [each for each in workers if each.address is not None and each != self._known.get(each.rank)]
            self._known.update({each.rank: each for each in new})
            stale = [peer for each in new if (peer := self._peers.get(each.rank)) and not _is(peer.member, each)]
        for peer in stale:
            peer.close("a later process has its rank")
        for each in new:
            if each.rank < self._me.rank:
                self._start_dialling(each)

    def send(self, rank: int, message: BetweenPeers, payload: memoryview | None = None) -> None:
        """Send a message, in the order of calls; dropped where there is no connection."""
        with self._lock:
            peer = self._peers.get(rank)
        if peer is not None:
            peer.send(message, payload)

    def close(self) -> None:
        """End all connections."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._acceptor.close()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close("it has finished")

    # ---- connecting ----------------------------------------------------------------------------------------------

    def _why_refused(self, member: Member) -> str | None:
        with self._lock:
            known = self._known.get(member.rank)
        if member.role == "worker" and known is not None and known.incarnation == member.incarnation:
            return None
        return f"{member} is no worker of this rack, or not reported yet"

    def _start_dialling(self, each: WorkerAt) -> None:
        name = f"psctl rack connection {self._me.rank}-{each.rank}"
        threading.Thread(target=self._dial_until_made, args=(each,), name=name, daemon=True).start()

    def _dial_until_made(self, each: WorkerAt) -> None:
        assert each.address is not None, "others are not dialled"
        pause = PAUSE
        while self._is_wanted(each):
            try:
                self._dial(Member("worker", each.rank, each.incarnation), each.address, self)
            except ConnectionFailed:  # it is not reported there yet, or it is lost: the coordinator will say so
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST)
                continue
            return

    def _is_wanted(self, each: WorkerAt) -> bool:
        with self._lock:
            return not self._closed.is_set() and self._known.get(each.rank) == each

    # ---- the handler of all connections ----------------------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Use a new connection, in the place of a former one to the same worker."""
        with self._lock:
            former = self._peers.get(peer.member.rank)
            self._peers[peer.member.rank] = peer
            closed = self._closed.is_set()
        if former is not None:
            former.close("there is a new connection")
            self._handler.on_connection_lost(former.member)
        if closed:
            peer.close("it has finished")
        self._handler.on_connected(peer.member)

    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        """Return memory for a payload; None when it cannot be one of a shard."""
        if size > self._most:
            return None
        return bytes_view(torch.empty(size, dtype=torch.uint8))

    def on_message(self, peer: PeerConnection, message: BetweenPeers, payload: memoryview | None) -> None:
        """Pass a message on, unless its connection was replaced."""
        with self._lock:
            used = self._peers.get(peer.member.rank) is peer
        if used:
            self._handler.on_bytes(peer.member, message, payload)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Report the end of the connection in use, and dial again."""
        rank = peer.member.rank
        with self._lock:
            used = self._peers.get(rank) is peer
            if used:
                del self._peers[rank]
            known = self._known.get(rank)
        if not used:
            return
        self._handler.on_connection_lost(peer.member)
        if known is not None and rank < self._me.rank:
            self._start_dialling(known)


def _is(member: Member, at: WorkerAt) -> bool:
    return (member.rank, member.incarnation) == (at.rank, at.incarnation)
