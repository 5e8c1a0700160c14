"""Where a server's tables are served: connections of workers and of other servers, and the one mind behind.

These connections are beside those of the dense store: a script that never asks for a store has none. All reader threads
feed the mind under one lock, and queue what it answers under the same lock, so that answers leave in the order in which
they were made. Payloads are received under no lock: a worker's into a buffer of its own, an entry's of another server
where the mind says.

Of two servers the one with the higher rank dials (server_links.py). Who is let in: of workers whoever the server
lets in, of servers the incarnations that the newest assignment names.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psctl.client.malloc_settings import keep_freed_memory
from psctl.client.server_links import Links, named
from psctl.client.shared_buffers import SharedRows
from psctl.errors import ConnectionFailed, MessageRefused, ProtocolError
from psctl.job.membership_messages import ProtocolViolation
from psctl.job.table_server_messages import TablesAssigned
from psctl.process.user_functions import JobFunctions
from psctl.ps.messages import Near
from psctl.ps.outputs import CaughtUp, HandedOver, Load, Save, ToServer
from psctl.ps.table_messages import Back
from psctl.ps.tables.server.held_answers import READERS, Send
from psctl.ps.tables.server.snapshot_reads import Look, Seen
from psctl.ps.tables.server.table_server import Output, TableMind
from psctl.ps.tables.table_packing import Assembly, in_parts, private
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Member, ServerAt

HELD_BACK = 600.0
"""Seconds that a worker which came early waits for the server to know its shards; the coordinator gives up before."""

PLACE_TAKEN = 5.0
"""Seconds that a member's new connection waits for its former one to be over."""

Report = CaughtUp | HandedOver | Save | Load | Send | ProtocolViolation
"""What is not for a worker or a server; of Send what is for readers."""


class TableDesk:
    """The handler of all connections to one server's tables.

    Args:
        rank: this server's.
        report: called, under the lock, with what is for the coordinator; must not block.
        dial: connects to another server's tables: (member, address, handler); raises ConnectionFailed.
        unreachable: told of a server that could not be reached.
        memory: what workers of this host read, and theirs; None: all bytes are sent.
        folder: the job's code on this host, from which users' functions are imported.
    """

    def __init__(
        self, rank: int, report: Callable[[Report], Any], dial: Callable[[Member, Any, Any], Any],
        unreachable: Callable[[ServerAt, ConnectionFailed], Any] = lambda at, error: None,
        memory: SharedRows | None = None, folder: str = "",
    ) -> None:  # fmt: skip
        self._rank, self._report, self._memory, self._folder = rank, report, memory, folder
        self._lent: dict[int, deque[memoryview]] = {}  # by worker: answers that it may be reading
        self._back: dict[int, int] = {}  # by worker: how many it has read
        self._mind: TableMind | None = None
        self._opened = threading.Event()
        self._closed = False
        self._lock = threading.RLock()
        self._peers: dict[tuple[str, int], PeerConnection] = {}
        self._parts: dict[PeerConnection, Assembly] = {}
        self._alive: frozenset[Member] = frozenset()
        self._epoch = -1
        self._links = Links(lambda at: dial(named(at), at.address, _Fellow(self, at)), unreachable)

    @property
    def links(self) -> Links:
        """Connections that this server dialled."""
        return self._links

    def close(self, reason: str) -> None:
        """End all connections."""
        self._closed = True
        self._opened.set()
        self._links.close(reason, 1.0)
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(5.0)

    # ---- the coordinator's word: its connection's reader thread --------------------------------------------------

    def assigned(self, told: TablesAssigned) -> None:
        """Take over which server has which shard; an older assignment than the newest says nothing."""
        found = told.assignment
        with self._lock:
            if found.epoch <= self._epoch:
                return
            self._epoch = found.epoch
            self._alive = frozenset(named(at) for at in found.servers)
            dead = [peer for peer in self._peers.values() if self.allow_server(peer.member) is not None]
        _dismiss(dead)
        with self._lock:
            if self._mind is None:
                keep_freed_memory()
                room = private if self._memory is None else self._memory.allocate
                self._mind = TableMind(self._rank, JobFunctions(self._folder), len(found.chains), room)
            alive = [at.rank for at in found.servers]
            self._follow(self._mind.assigned(found.epoch, found.chains, found.copies, alive))
            if told.begins:
                self._follow(self._mind.begin(restored=bool(told.saved)))
        self._opened.set()
        self._links.assigned([at for at in found.servers if at.rank < self._rank])

    def loaded(self, shard: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what a checkpoint had of a shard."""
        with self._lock:
            if self._mind is not None:
                self._follow(self._mind.loaded(shard, tensors))

    def save(self, step: int) -> None:
        """Give the tables' part of a checkpoint (Save is reported) when all workers have marked it."""
        with self._lock:
            if self._mind is not None:
                self._follow(self._mind.save(step))

    def look(self, look: Look) -> None:
        """Answer who reads from outside the job (Seen is reported)."""
        with self._lock:
            if self._mind is None or self._closed:
                self._report(Send(READERS, Seen(look, -1, 0, [], [], [], [])))
                return
            self._mind.readers.look(look, self._mind.epoch)
            self._follow(self._mind.told())

    def gone(self, rank: int, incarnation: int) -> None:
        """End the connection of a worker's incarnation that is dead; what it pushed stays."""
        with self._lock:
            peer = self._peers.get(("worker", rank))
        if peer is not None and peer.member.incarnation <= incarnation:
            _dismiss([peer])
        with self._lock:
            if ("worker", rank) not in self._peers:
                self._lent.pop(rank, None)

    def leave(self, lost: Mapping[int, int]) -> None:
        """These workers are gone for good (by rank, the last sequence that counts): nobody waits for them any more."""
        with self._lock:
            if self._mind is not None:
                self._follow(self._mind.leave(lost))

    def allow_server(self, member: Member) -> str | None:
        """Return why a server may not connect; None when it may, or is no server."""
        if member.role != "server" or member in self._alive:
            return None
        return f"{member} of incarnation {member.incarnation} is not of the newest assignment of tables"

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Somebody is there (again): what an older connection of his asked for is forgotten."""
        mind, who = self._mind_for(peer), (peer.member.role, peer.member.rank)
        former = self._peers.get(who)
        if former is not None:
            former.close("you connected again")
            former.join(PLACE_TAKEN)
        with self._lock:
            if who in self._peers:
                raise ProtocolError(f"{peer.member} has another connection, which does not end")
            refusal = self.allow_server(peer.member)  # it may have died since the handshake
            if refusal is not None:
                raise ProtocolError(refusal)
            self._peers[who], self._parts[peer] = peer, Assembly()
            if peer.member.role == "worker":  # it has made an end of what it read on a connection before
                self._lent[peer.member.rank], self._back[peer.member.rank] = deque(), 0
            if peer.member.role == "server":
                self._follow(mind.server_joined(peer.member.rank))
            else:
                mind.lost(peer.member.rank)

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """A worker's payloads gather in a buffer a message; another server's go where the mind says."""
        if peer.member.role == "worker":
            return self._parts[peer].place(message, size)
        with self._lock:
            return self._mind_for(peer).place_from(peer.member.rank, message, size)

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand a whole message to the mind and do what it says."""
        size = 0 if payload is None else len(payload)
        mind = self._mind_for(peer)
        if peer.member.role == "server":
            with self._lock:
                if self._speaks(peer):
                    self._follow(mind.received_from(peer.member.rank, message, size))
            return
        lent = self._memory.lent_bytes(peer, message) if self._memory is not None else None
        if isinstance(message, Near):
            return
        if isinstance(message, Back):
            self._given_back(peer.member.rank, message.answers)
            return
        whole = (message, lent) if lent is not None else self._parts[peer].received(message, size)
        if whole is None:
            return
        with self._lock:
            if self._speaks(peer):
                self._follow(mind.received(peer.member.rank, *whole))

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Forget a connection; what came by it stays, and so does what it may be reading."""
        if self._memory is not None:
            self._memory.forget(peer.member)
        with self._lock:
            if isinstance(error, MessageRefused):
                self._report(ProtocolViolation(peer.member, error.message[:1000]))
            self._parts.pop(peer, None)
            if not self._speaks(peer):
                return
            del self._peers[peer.member.role, peer.member.rank]
            if self._mind is None or self._closed:
                return
            if peer.member.role == "server":
                self._follow(self._mind.server_lost(peer.member.rank))
            else:
                self._mind.lost(peer.member.rank)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _given_back(self, worker: int, answers: int) -> None:
        """A worker has read so many of the answers that it was lent."""
        with self._lock:
            held = self._lent.get(worker, deque())
            more = answers - self._back.get(worker, 0)
            if not 0 <= more <= len(held):
                raise ProtocolError(f"worker/{worker} gives back {more} answers of {len(held)} that it was lent")
            self._back[worker] = answers
            for _ in range(more):
                held.popleft()

    def _send(self, peer: PeerConnection, output: Send) -> None:
        lent = None
        if self._memory is not None:
            lent = self._memory.lend(output.worker, output.message, output.payload)
        if lent is not None and output.payload is not None:
            self._lent[output.worker].append(output.payload)
            peer.send(lent)
            return
        for message, payload in in_parts(output.message, output.payload):
            peer.send(message, payload)

    def _speaks(self, peer: PeerConnection) -> bool:
        return self._peers.get((peer.member.role, peer.member.rank)) is peer

    def _mind_for(self, peer: PeerConnection) -> TableMind:
        if not self._opened.is_set():
            self._opened.wait(HELD_BACK)
        if self._mind is None or self._closed:
            raise ProtocolError(f"this server holds no tables, so none for {peer.member} either")
        return self._mind

    def _follow(self, outputs: Sequence[Output]) -> None:
        """Do what the mind said. Who is not connected misses his message; it is said again when he is back."""
        for output in outputs:
            match output:
                case Send() if output.worker == READERS:
                    self._report(output)
                case Send():
                    peer = self._peers.get(("worker", output.worker))
                    if peer is not None:
                        self._send(peer, output)
                case ToServer():
                    peer = self._peers.get(("server", output.server))
                    if peer is not None:
                        peer.send(output.message, output.payload)
                case _:
                    self._report(output)


def _dismiss(peers: Sequence[PeerConnection]) -> None:
    """End connections of the dead, to the last byte."""
    for peer in peers:
        peer.close("you were given up for dead")
    for peer in peers:
        peer.join(PLACE_TAKEN)


class _Fellow:
    """The handler of a connection that this server dialled to another: the desk's, and it keeps the links."""

    def __init__(self, desk: TableDesk, at: ServerAt) -> None:
        self._desk, self._at = desk, at
        self.receive_buffer_for, self.on_message = desk.receive_buffer_for, desk.on_message

    def on_connected(self, peer: PeerConnection) -> None:
        """Take it into use, unless it is not wanted any more."""
        if not self._desk.links.up(self._at, peer):
            raise ProtocolError(f"server/{self._at.rank} is not of the newest assignment")
        self._desk.on_connected(peer)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """It is over; the links make it again while that server lives."""
        self._desk.on_connection_lost(peer, error)
        self._desk.links.down(self._at, peer, error)
