"""The coordinator's connections to all members, and the bulk data that passes without the state machine.

Messages become inputs of the state machine. Bulk data does not: parts of checkpoints go to the saver, wanted slices of
a checkpoint are read and sent by one thread a member, start values of worker 0 are relayed to the other workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from psctl.checkpoint.reader import open_checkpoint, read_slice
from psctl.coordinator.checkpoint_saver import CheckpointSaver
from psctl.coordinator.sessions import MemberSessions, SessionMessage
from psctl.coordinator.state.instructions import Connected, ConnectionLost, Input, MessageReceived, ProtocolBroken
from psctl.errors import ConnectionFailed, MessageRefused, PsctlError
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.leadership_messages import LeadershipAccepted, ReplicaStored
from psctl.job.message import JobMessage
from psctl.job.message_session import is_numbered
from psctl.job.process_messages import ClockIs, ClockWanted, Register
from psctl.job.session_messages import MessagesReceived, ResumeSession, SessionResumed
from psctl.job.silence import TOLERANCE
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted
from psctl.job.training_messages import Join, StartBegin, StartEnd, StartPart
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member

QUEUED = 8 << 20
"""Most bytes of bulk data that wait in one peer's send queue."""

PARTS = 4
"""Parts of checkpoints that a member may send at once; psctl's own members send one after another."""

WANTED = 1024
"""Waiting requests of a member for slices of a checkpoint; a server sends one for each of its shards."""

FIRST = (Join, Register, ResumeSession)
"""The first messages on connections, by which sessions begin or continue."""

FLUSH_TIMEOUT = 60.0
"""Seconds in which a full send queue must be sent."""


class LeadershipAnswers(Protocol):
    """Takes what agents say about the leadership (standby_copy.py); called on the threads of connections."""

    def on_registered(self, host: int, address: Address | None) -> None:
        """An agent has connected."""

    def on_message(self, host: int, message: LeadershipAccepted | ReplicaStored) -> None:
        """An agent answers."""


class CoordinatorConnections:
    """The handler of all connections of the coordinator.

    Args:
        put: takes inputs for the state machine, from any thread.
        saver: takes parts of checkpoints.
        sessions: with all members.
        as_sent: returns the message that is sent for one that a session keeps.
        resume: folder of the checkpoint that the job resumes from.
        why_refused: returns why a member may not send a message now, or ""; called on any thread.
        leadership: takes what agents say about the leadership; None: the job has no standby.
    """

    def __init__(
        self, put: Callable[[Input], None], saver: CheckpointSaver, sessions: MemberSessions,
        as_sent: Callable[[SessionMessage], JobMessage], resume: Path | None,
        why_refused: Callable[[Member, JobMessage], str] = lambda member, message: "",
        leadership: LeadershipAnswers | None = None,
    ) -> None:  # fmt: skip
        self._leadership = leadership
        self._put = put
        self._saver = saver
        self._sessions, self._as_sent = sessions, as_sent
        self._resume = resume
        self._why_refused = why_refused
        self._lock = threading.Lock()
        self._peers: dict[Member, PeerConnection] = {}
        self._ready: dict[Member, PeerConnection] = {}  # on which the session was begun or resumed; the main thread's
        self._acknowledged: dict[Member, int] = {}  # the main thread's
        self._first_on: dict[Member, deque[PeerConnection]] = {}  # the connections of first messages in the queue
        self._parts: dict[PeerConnection, set[tuple[int, bool]]] = {}  # parts that have begun: (step, of tables)
        self._wanted: dict[PeerConnection, deque[LoadWanted]] = {}  # a thread answers them

    def read_from(self, folder: Path | None) -> None:
        """Read from this checkpoint from now on; None: there is none, the job begins with its start values."""
        self._resume = folder

    # ---- sessions: the main thread -----------------------------------------------------------------------------------

    def start_session(self, member: Member, new: bool) -> None:
        """Begin or resume the session of a member, whose first message on a connection was taken from the queue.

        Args:
            member: the member.
            new: its session begins now.
        """
        with self._lock:
            peer = self._first_on[member].popleft()
            current = self._peers.get(member) is peer
        session = self._sessions.by_member.get(member)
        if new:
            self._acknowledged.pop(member, None)
        if not current or self._ready.get(member) is peer:
            return  # the connection is lost again; where there is another one, its first message follows
        if session is None:
            peer.close("its session is over")
            return
        self._ready[member] = peer
        if member.role == "agent" or not new:
            peer.send(SessionResumed(None if new else session.received), urgent=True)
        for message in session.unacknowledged():
            peer.send(self._as_sent(message), urgent=True)

    def send(self, member: Member, message: SessionMessage) -> None:
        """Send a message to a member, before bulk data. While it is not connected its session keeps the message, if it
        has one and the message is numbered."""
        peer = self.peer(member)
        if peer is not None and (self._ready.get(member) is peer or not is_numbered(message)):
            peer.send(self._as_sent(message), urgent=True)

    def have_sessions(self, members: list[Member]) -> bool:
        """Return whether the sessions of all these members are begun or resumed on their present connections."""
        return all((peer := self.peer(member)) is not None and self._ready.get(member) is peer for member in members)

    def acknowledge(self) -> None:
        """Acknowledge the messages that were received since the last call."""
        for member, session in self._sessions.by_member.items():
            if self._acknowledged.get(member, 0) != session.received:
                self._acknowledged[member] = session.received
                self.send(member, MessagesReceived(session.received))

    def peer(self, member: Member) -> PeerConnection | None:
        """Return the connection of a member."""
        with self._lock:
            return self._peers.get(member)

    def connected(self) -> list[Member]:
        """Return the members that are connected now."""
        with self._lock:
            return list(self._peers)

    def agents_silent_for(self) -> dict[int, float]:
        """Return the seconds since the last packet of each connected agent's host, by its index."""
        with self._lock:
            agents = [peer for member, peer in self._peers.items() if member.role == "agent"]
        return {peer.member.rank: peer.silent_for() for peer in agents}

    def close_connection(self, member: Member, reason: str) -> None:
        """Close the connection of a member that broke the protocol."""
        peer = self.peer(member)
        if peer is not None:
            peer.close(reason)

    def close(self, timeout: float) -> None:
        """Send what is queued for all members, then close all connections."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            with contextlib.suppress(PsctlError):  # it is lost, or does not read: it will notice the close
                peer.flush(timeout)
        for peer in peers:
            peer.close("the job is over")

    # ---- the handler's methods, on each peer's reader thread -------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """A member is connected; a newer connection of the same member replaces an older one."""
        peer.tolerate(TOLERANCE)
        with self._lock:
            self._peers[peer.member] = peer
        self._put(Connected(peer.member))

    def receive_buffer_for(self, peer: PeerConnection, message: JobMessage, size: int) -> memoryview | None:
        """Return None: payloads are written or relayed from the transport's own buffer."""
        return None

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        """Pass bulk data on, and everything else to the state machine."""
        match message:
            case SavePart():
                self._check_begun(peer, message)
                self._saver.part(_sender(peer, message), message, payload)
            case SaveBegin():
                self._begin_part(peer, message)
                self._saver.begin(_sender(peer, message), message)
                self._put_message(peer, SaveBegin(message.step, [], tables=message.tables))
            case SaveEnd():
                self._check_begun(peer, message)
                self._parts[peer].discard((message.step, message.tables))
                self._saver.end(_sender(peer, message), message.step)
                self._put_message(peer, message)
            case StartBegin() | StartPart() | StartEnd():
                self._relay_start_values(peer, message, payload)
            case LoadWanted():
                self._enqueue_load(peer, message)
            case ReadWanted():
                self._ask_servers(peer, message)
            case ReadRows():
                self._answer_reader(peer, message, payload)
            case ClockWanted(ticket=ticket):
                peer.send(ClockIs(ticket, time.monotonic_ns()), urgent=True)
            case MessagesReceived(count=count):
                self._take_acknowledgement(peer, count)
            case LeadershipAccepted() | ReplicaStored():
                if self._leadership is not None:
                    self._leadership.on_message(peer.member.rank, message)
            case Register(listens=listens):
                if self._leadership is not None:
                    self._leadership.on_registered(peer.member.rank, listens)
                self._put_message(peer, message)
            case _:
                self._put_message(peer, message)

    def _put_message(self, peer: PeerConnection, message: JobMessage) -> None:
        """Pass a message to the state machine, unless the member has connected again: then it sends it again."""
        with self._lock:
            if self._peers.get(peer.member) is peer:
                if isinstance(message, FIRST):
                    self._first_on.setdefault(peer.member, deque()).append(peer)
                self._put(MessageReceived(peer.member, message))

    def _take_acknowledgement(self, peer: PeerConnection, count: int) -> None:
        session = self._sessions.by_member.get(peer.member)
        try:
            if session is not None:
                session.acknowledge(count)
        except ValueError as error:
            raise MessageRefused(f"it broke the protocol: {error}", where=str(peer.member)) from error

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """A connection ended; an older one of a member that has reconnected does not count."""
        with self._lock:
            current = self._peers.get(peer.member) is peer
            if current:
                del self._peers[peer.member]
            parts = self._parts.pop(peer, set())
        for step, tables in parts:
            self._saver.interrupt(_part_name(peer.member, tables=tables), step)
        if isinstance(error, MessageRefused):
            self._put(ProtocolBroken(peer.member, error.message))
        elif current:
            self._put(ConnectionLost(peer.member, error.message))

    # ---- bulk ------------------------------------------------------------------------------------------------------

    def _relay_start_values(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        """Send start values of worker 0 to every other worker."""
        data = bytes(payload) if payload is not None else None
        with self._lock:
            others = [each for member, each in self._peers.items() if member.role == "worker" and member.rank != 0]
        for other in others:
            other.send(message, data)
            _wait(other)

    def _ask_servers(self, peer: PeerConnection, wanted: ReadWanted) -> None:
        """Relay the request of a reader outside the job to all servers."""
        with self._lock:
            servers = [each for member, each in self._peers.items() if member.role == "server"]
        peer.send(ReadBy(wanted.ticket, len(servers)))
        for server in servers:
            server.send(msgspec.structs.replace(wanted, host=peer.member.rank))

    def _answer_reader(self, peer: PeerConnection, rows: ReadRows, payload: memoryview | None) -> None:
        """Relay a server's answer; it is dropped when the reader's queue is full, and the reader tries again."""
        reader = self.peer(Member("agent", rows.host))
        if reader is not None and reader.pending() <= QUEUED:
            reader.send(rows, bytes(payload) if payload is not None else None)

    def _begin_part(self, peer: PeerConnection, message: SaveBegin) -> None:
        """Record that a member begins a part of a checkpoint, or refuse it."""
        why = self._why_refused(peer.member, message)
        parts = self._parts.setdefault(peer, set())
        if len(parts) >= PARTS:
            why = f"{len(parts)} parts of checkpoints at once"
        if why:
            raise MessageRefused(f"it broke the protocol: SaveBegin: {why}", where=str(peer.member))
        parts.add((message.step, message.tables))

    def _check_begun(self, peer: PeerConnection, message: SavePart | SaveEnd) -> None:
        """Refuse a message that belongs to no part that this member has begun."""
        if (message.step, message.tables) not in self._parts.get(peer, ()):
            why = f"{type(message).__name__} of step {message.step}, whose part it has not begun"
            raise MessageRefused(f"it broke the protocol: {why}", where=str(peer.member))

    def _enqueue_load(self, peer: PeerConnection, message: LoadWanted) -> None:
        """Queue a request; one thread a member answers its requests."""
        with self._lock:
            waiting = self._wanted.setdefault(peer, deque())
            waiting.append(message)
            count = len(waiting)
        if count > WANTED:
            why = f"{count} requests for tensors at once"
            raise MessageRefused(f"it broke the protocol: LoadWanted: {why}", where=str(peer.member))
        if count == 1:
            name = f"psctl load {peer.member}"
            threading.Thread(target=self._load_all, args=(peer,), name=name, daemon=True).start()

    def _load_all(self, peer: PeerConnection) -> None:
        """Answer the requests of a member in order until none is left."""
        while True:
            with self._lock:
                wanted = self._wanted[peer][0]
            self._load(peer, wanted)
            with self._lock:
                self._wanted[peer].popleft()
                if not self._wanted[peer]:
                    del self._wanted[peer]
                    return

    def _load(self, peer: PeerConnection, wanted: LoadWanted) -> None:
        """Send the wanted slices of the checkpoint that the job resumes from."""
        try:
            if self._resume is None:
                peer.send(LoadEnd(wanted.ticket, "the job does not resume from a checkpoint"))
                return
            manifest = open_checkpoint(self._resume)
            for index, piece in enumerate(wanted.slices):
                for offset, data in read_slice(self._resume, manifest, piece):
                    peer.send(LoadPart(wanted.ticket, index, offset), data)
                    _wait(peer)
            peer.send(LoadEnd(wanted.ticket))
        except PsctlError as error:
            peer.send(LoadEnd(wanted.ticket, error.message))


def _sender(peer: PeerConnection, message: SaveBegin | SavePart | SaveEnd) -> str:
    """Return the sender of a part as the part's file is named."""
    return _part_name(peer.member, tables=message.tables)


def _part_name(member: Member, *, tables: bool) -> str:
    return f"tables/{member.rank}" if tables else str(member)


def _wait(peer: PeerConnection) -> None:
    """Wait until a long send queue is sent, so that memory does not fill up."""
    if peer.pending() > QUEUED:
        with contextlib.suppress(ConnectionFailed):  # reported by `on_connection_lost`
            peer.flush(FLUSH_TIMEOUT)
