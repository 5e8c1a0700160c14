"""Where a server's workers and fellow servers are served: their connections, the mind, and the locks between.

Locking rule. Each connection has its own reader thread, and all of them feed one mind. The mind guards each shard, and
the ledger of step orders, with a lock of its own. Under a shard's lock run the sum, the optimizer's step, the choice of
what to answer and its sending (which only queues), so that what is said of a shard leaves in the order in which it was
said: the thread that brings the missing piece does the work, the other threads go on with other shards. Step orders,
which touch all shards, are taken in one at a time. Locks are taken in the order steps, shard, ledger, peers. Bytes are
received into staging buffers under no lock. Nothing ever waits for the network.

Who is let in. A certificate names an incarnation, and of each member only the newest that is alive may speak: a
worker's death is told by `gone`, a server's by the assignment that no longer names it. When a member connects again,
its former connection is over, to the last byte, before the new one begins.

Of two servers the one with the higher rank dials (server_links.py); both speak on that connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from psctl.client.server_links import Links
from psctl.client.shared_buffers import SharedBuffers, private_buffers
from psctl.errors import ConnectionFailed, MessageRefused, ProtocolError
from psctl.job.membership_messages import ProtocolViolation
from psctl.ps.dense.server.dense_server import LEDGER, ServerMind
from psctl.ps.messages import Near, Step
from psctl.ps.outputs import CaughtUp, HandedOver, Held, Instruction, Save, Send, ToServer
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Assignment, Member, ServerAt

HELD_BACK = 600.0
"""Seconds that a worker which came early waits for the server to know its shards; the coordinator gives up before."""

PLACE_TAKEN = 5.0
"""Seconds that a member's new connection waits for its former one to be over."""

Report = CaughtUp | HandedOver | Held | ProtocolViolation
"""What there is to say to the coordinator."""

Who = tuple[str, int]
"""A member without its incarnation: role and rank."""


class Locks(dict[int, AbstractContextManager[object]]):
    """A lock for each shard of the job, and for LEDGER."""

    def __missing__(self, shard: int) -> AbstractContextManager[object]:
        """Return one for what is no shard of the job: the mind will say so."""
        return threading.Lock()


class Desk:
    """The handler of all connections of workers and servers, those that we dialled included.

    Args:
        me: this server.
        save: called with a checkpoint part, on the thread that made it whole; must not block.
        report: called with what is for the coordinator.
        sharing: memory that workers of this host read, and theirs; None: all bytes are sent.
    """

    def __init__(
        self,
        me: Member,
        save: Callable[[Save], None],
        report: Callable[[Report], None] = lambda _: None,
        sharing: SharedBuffers | None = None,
    ) -> None:
        self._me, self._save, self._report, self.sharing = me, save, report, sharing or private_buffers(me)
        self._mind: ServerMind | None = None
        self._opened, self._open = threading.Event(), False  # who sees the second need not ask the first
        self._closed = False
        self._lock = threading.Lock()
        self._steps = threading.Lock()
        self._locks = Locks()
        self._peers: dict[Who, PeerConnection] = {}
        self._newest: dict[Who, int] = {}  # incarnation that may speak; those below are dead
        self._alive: set[Member] | None = None  # servers
        self._epoch = -1

    def open(
        self, make: Callable[[Callable[[int], AbstractContextManager[object]]], ServerMind], shards: int
    ) -> ServerMind:
        """Make the mind with this desk's locks; the first assignment lets everyone in.

        Args:
            make: called with the mind's `guard`.
            shards: how many the job has.
        """
        self._locks.update((index, threading.RLock()) for index in (LEDGER, *range(shards)))
        mind = self._mind = make(self._locks.__getitem__)
        return mind

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """Do what the mind said. Who is not connected misses his message; it is said again when he is back."""
        for instruction in instructions:
            match instruction:
                case Send():
                    peer = self._peers.get(("worker", instruction.rank))
                case ToServer():
                    peer = self._peers.get(("server", instruction.server))
                case Save():
                    self._save(instruction)
                    continue
                case CaughtUp() | HandedOver() | Held():
                    self._report(instruction)
                    continue
            if peer is not None:
                peer.send(instruction.message, instruction.payload)

    def close(self, reason: str) -> None:
        """End all connections."""
        self._closed = True
        self._opened.set()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(5.0)

    # ---- who takes part: the coordinator connection's reader thread ----------------------------------------------

    def assigned(self, assignment: Assignment) -> None:
        """Take in a new assignment; an older one than the newest says nothing."""
        alive = {Member("server", at.rank, at.incarnation) for at in assignment.servers}
        with self._lock:
            if assignment.epoch <= self._epoch:
                return
            self._epoch, self._alive = assignment.epoch, alive
            for member in alive:
                self._newest[member.role, member.rank] = member.incarnation
            dead = [peer for who, peer in self._peers.items() if who[0] == "server" and peer.member not in alive]
        self._dismiss(dead)
        mind = self._mind
        assert mind is not None, "the first assignment comes with the decision"
        ranks = {at.rank for at in assignment.servers}
        self.follow(mind.assigned(assignment.epoch, assignment.chains, assignment.copies, ranks))
        self._open = True
        self._opened.set()

    def gone(self, rank: int, incarnation: int) -> None:
        """Take in that an incarnation of a worker is dead: it and older ones are refused from now on."""
        who = ("worker", rank)
        with self._lock:
            self._newest[who] = max(self._newest.get(who, 0), incarnation + 1)
            peer = self._peers.get(who)
        if peer is not None and peer.member.incarnation <= incarnation:
            self._dismiss([peer])

    def allow(self, member: Member) -> str | None:
        """Return why a member may not connect, None when it may."""
        if member.role not in ("worker", "server"):
            return f"a server speaks to workers and servers, not to {member}"
        with self._lock:
            newest = self._newest.get((member.role, member.rank), 0)
            if member.incarnation < newest:
                return f"incarnation {member.incarnation} of {member} is dead"
            if member.role == "server" and self._alive is not None and member.incarnation == newest:
                known = (member.role, member.rank) in self._newest
                if known and member not in self._alive:
                    return f"{member} was given up for dead"
        return None

    def allow_worker(self, member: Member) -> str | None:
        """As `allow`, where only workers are spoken to."""
        return self.allow(member) if member.role == "worker" else f"tables are for workers, not for {member}"

    def _dismiss(self, peers: Sequence[PeerConnection]) -> None:
        """End connections of the dead, to the last byte."""
        for peer in peers:
            peer.close("you were given up for dead")
        for peer in peers:
            peer.join(PLACE_TAKEN)

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Hold who comes early back until there is a mind, then let him in."""
        who = _who(peer.member)
        mind = self._mind_for(peer)
        former = self._peers.get(who)
        if former is not None:
            former.close("you connected again")
            former.join(PLACE_TAKEN)
        with self._lock:
            if who in self._peers:
                raise ProtocolError(f"{peer.member} has another connection, which does not end")
            self._peers[who] = peer
        refusal = self.allow(peer.member)  # it may have died since the handshake
        if refusal is not None:
            raise ProtocolError(refusal)
        self.follow(mind.joined(who[1]) if who[0] == "worker" else mind.server_joined(who[1]))

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Let the mind say where a payload goes."""
        (role, rank), mind = self._speaks(peer)
        if role == "worker":
            return mind.place(rank, message, size)
        return mind.place_from(rank, message, size)

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand a message to the mind and do what it says."""
        (role, rank), mind = self._speaks(peer)
        size = 0 if payload is None else len(payload)
        lent = self.sharing.lent_bytes(peer, message)
        if isinstance(message, Near):
            return
        with self._in_order(message):
            if role == "worker":
                self.follow(mind.received(rank, message, size, lent))
            else:
                self.follow(mind.received_from(rank, message, size))

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Forget who is gone. Whether the job goes on is the coordinator's to say."""
        who = _who(peer.member)
        if isinstance(error, MessageRefused):
            self._report(ProtocolViolation(peer.member, error.message[:1000]))
        with self._lock:
            current = self._peers.get(who) is peer
            if current:
                del self._peers[who]
        if current and self._mind is not None:
            if who[0] == "worker":
                self.sharing.forget(peer.member)
                self._mind.lost(who[1])
            else:
                self.follow(self._mind.server_lost(who[1]))

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _in_order(self, message: Any) -> AbstractContextManager[object]:
        """Return what to hold from a message's arrival until all that follows from it is queued."""
        if isinstance(message, Step):
            return self._steps
        shard = getattr(message, "shard", None)
        return nullcontext() if shard is None else self._locks[shard]

    def _speaks(self, peer: PeerConnection) -> tuple[Who, ServerMind]:
        """Return who speaks, and to whom: a member has been let in when there was a mind."""
        who = peer.member.role, peer.member.rank
        if self._peers.get(who) is not peer:
            raise ProtocolError(f"{peer.member} has another connection")
        return who, self._mind if self._mind is not None and not self._closed else self._mind_for(peer)

    def _mind_for(self, peer: PeerConnection) -> ServerMind:
        if not self._open:
            self._opened.wait(HELD_BACK)
        if self._mind is None or self._closed:
            raise ProtocolError(f"this server serves no one, so not {peer.member} either")
        return self._mind


def _who(member: Member) -> Who:
    return member.role, member.rank


class Fellow:
    """The handler of a connection that this server dialled to another: the desk's, and it keeps the links.

    Args:
        desk: serves it.
        links: to be told when it begins and ends.
        at: the other server.
    """

    def __init__(self, desk: Desk, links: Links, at: ServerAt) -> None:
        self._desk, self._links, self._at = desk, links, at
        self.receive_buffer_for, self.on_message = desk.receive_buffer_for, desk.on_message

    def on_connected(self, peer: PeerConnection) -> None:
        """Take it into use, unless it is not wanted any more."""
        if not self._links.up(self._at, peer):
            raise ProtocolError(f"server/{self._at.rank} is not of the newest assignment")
        self._desk.on_connected(peer)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """It is over; the links make it again while that server lives."""
        self._desk.on_connection_lost(peer, error)
        self._links.down(self._at, peer, error)
