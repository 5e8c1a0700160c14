"""Connects a worker's stores to the servers of their tables, or to one server within the process when there is no job.

Both deliver whole messages, in order, to the addressed store. When a connection breaks and is made again, each store
starts a new session with that server: it sends its outstanding calls again to the servers that lead their shards, and
each is applied once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol, cast

from psctl.client.server_connections import Dial, ServerConnections, Unreachable
from psctl.client.server_waits import Servers
from psctl.client.shared_buffers import SharedRows
from psctl.errors import ConnectionFailed
from psctl.job.table_server_messages import TablesAt
from psctl.process.user_functions import JobFunctions
from psctl.ps.messages import Message, SharedMemoryAccepted
from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import AnswersRead, TableFromServer, TableFromWorker
from psctl.ps.tables.server.table_server import TableServer
from psctl.ps.tables.table_packing import Allocate, allocate_private
from psctl.transport.peer_connection import PeerConnection

SHARDS = 4
"""Shards of a store within one process."""

FLUSH = 1.0
"""Seconds to send queued messages when all connections are closed."""

REPORT_EVERY = 8
"""Number of answers in a server's memory after which AnswersRead is sent; fewer are reported with the next message."""

NOTHING = memoryview(b"")


class StoreSession(Protocol):
    """The store's handler of server events; called on any thread, in order for each server."""

    def start_session(self, server: int, attach: Callable[[], None]) -> None:
        """A connection is made: call `attach`, after which `send` uses it, and start a session."""

    def on_message(
        self, server: int, peer: PeerConnection | None, message: TableFromServer, payload: memoryview
    ) -> None:
        """Process a whole message."""


class StoreServers(Protocol):
    """All servers, as the stores of a process share them."""

    shards: int
    """Shards of a store."""

    @property
    def connections(self) -> Servers:
        """The servers, as waits see them."""

    @property
    def allocate(self) -> Allocate:
        """Allocates the memory of long messages."""

    def open(self, store: str, session: StoreSession) -> None:
        """Start sessions of a store with all servers that are connected, now and later."""

    def send(self, store: str, server: int, message: Message, payload: memoryview | None) -> None:
        """Queue a message; never blocks. Dropped when the server is not connected: `start_session` follows."""

    def end(self, store: str, flush: float) -> None:
        """End a store's sessions, after at most `flush` seconds to send what is queued."""

    def close(self, reason: str) -> None:
        """End all connections."""


class LocalServer:
    """One server within this process. Messages are answered at once, on the thread that sends."""

    def __init__(self) -> None:
        self.shards = SHARDS
        self.allocate: Allocate = allocate_private
        self.connections = self
        self._state = TableServer(0, JobFunctions(), SHARDS)
        self._state.on_assignment(0, [[0]] * SHARDS, [[]] * SHARDS, [0])
        self._state.start_shards(restored=False)
        self._queue: deque[tuple[Message, memoryview | None]] = deque()
        self._busy = False
        self._sessions: dict[str, StoreSession] = {}

    def open(self, store: str, session: StoreSession) -> None:
        self._sessions[store] = session
        session.start_session(0, lambda: None)

    def send(self, store: str, server: int, message: Message, payload: memoryview | None) -> None:
        self._queue.append((message, payload))
        if self._busy:  # an answer made the store send: the loop below processes it next
            return
        self._busy = True
        try:
            while self._queue:
                asked, data = self._queue.popleft()
                for answer in self._state.on_worker_message(0, cast(TableFromWorker, asked), data or NOTHING):
                    assert isinstance(answer, ToWorker), "there is no other server"
                    data = answer.payload if answer.payload is not None else NOTHING
                    reply = cast(TableFromServer, answer.message)
                    self._sessions[reply.store].on_message(0, None, reply, data)
        finally:
            self._busy = False

    def end(self, store: str, flush: float) -> None:
        del self._sessions[store]

    def close(self, reason: str) -> None:
        return

    # ---- as waits see it: there is no connection -----------------------------------------------------------------

    def acquire_read_lease(self, servers: Collection[int]) -> None:
        return None

    def error(self, server: int) -> None:
        return None

    def name_of(self, server: int) -> str:
        return "this process"


class ServerState:
    """One connection to a server's tables: the stores with a session on it, and the answers that were read."""

    def __init__(self) -> None:
        self.stores: set[str] = set()
        self.read = 0  # answers in the server's memory that were read
        self.unreported = False  # the last of them are not reported to the server yet


class RemoteServers:
    """Connections to the servers of a job. It is the user of ServerConnections.

    Args:
        first: the servers, as the coordinator assigned them first.
        dial: connects to a server's tables.
        unreachable: called for a server that could not be reached.
        memory: memory that servers of this host read, and theirs; None: all bytes are sent.
    """

    def __init__(
        self, first: TablesAt, dial: Dial, unreachable: Unreachable = lambda at, error: None,
        memory: SharedRows | None = None,
    ) -> None:  # fmt: skip
        self.shards = first.shards
        self.allocate: Allocate = allocate_private if memory is None else memory.allocate
        self.connections = ServerConnections(dial, self, unreachable)
        self._memory = memory
        self._lock = threading.Lock()
        self._epoch = -1
        self._states: dict[PeerConnection, ServerState] = {}  # by connection
        self._sessions: dict[str, StoreSession] = {}  # by store
        self.assign(first)

    def assign(self, at: TablesAt) -> None:
        """Connect to the servers of a new assignment; an older one changes nothing. Called on one thread."""
        if at.epoch > self._epoch:
            self._epoch = at.epoch
            self.connections.assign(at.servers)

    def open(self, store: str, session: StoreSession) -> None:
        with self._lock:
            self._sessions[store] = session
            peers = sorted(self._states, key=lambda peer: peer.member.rank)
        for peer in peers:
            self._start(store, session, peer)

    def send(self, store: str, server: int, message: Message, payload: memoryview | None) -> None:
        peer = self.connections.in_use.get(server)
        state = self._states.get(peer) if peer is not None else None
        if peer is None or state is None or store not in state.stores:
            return
        if state.unreported:
            self._report_read(peer, state)
        shared = self._memory.share(server, message, payload) if self._memory is not None else None
        if shared is None:
            peer.send(message, payload)
        else:
            peer.send(shared, None)

    def end(self, store: str, flush: float) -> None:
        self.connections.flush(flush)
        with self._lock:
            self._sessions.pop(store, None)

    def close(self, reason: str) -> None:
        self.connections.close(reason, FLUSH)

    def _start(self, store: str, session: StoreSession, peer: PeerConnection) -> None:
        """Start a store's session on a connection; before that the store sends nothing on it."""
        state = self._states.get(peer)
        if state is not None:
            session.start_session(peer.member.rank, lambda: state.stores.add(store))

    def _report_read(self, peer: PeerConnection, state: ServerState) -> None:
        """Report to a server how many of the answers in its memory were read."""
        with self._lock:  # a thread that counted more sends later
            if state.unreported:
                state.unreported = False
                peer.send(AnswersRead(state.read), None)

    # ---- the handler: each connection's reader thread ------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Start the sessions of all stores."""
        if self._memory is not None:
            self._memory.offer(peer)
        with self._lock:
            self._states[peer] = ServerState()
            sessions = dict(self._sessions)
        for store, session in sessions.items():
            self._start(store, session, peer)

    def receive_buffer_for(self, peer: PeerConnection, message: TableFromServer, size: int) -> memoryview | None:
        return allocate_private(size).data

    def on_message(self, peer: PeerConnection, message: TableFromServer, payload: memoryview | None) -> None:
        """Deliver a whole message to its store."""
        state, shared = self._states[peer], None
        if self._memory is not None and (
            isinstance(message, SharedMemoryAccepted) or getattr(message, "at", None) is not None
        ):
            shared = self._memory.find_shared_bytes(peer, message)
            if shared is None:
                return
        session = self._sessions.get(message.store)
        if session is not None:
            session.on_message(peer.member.rank, peer, message, shared or payload or NOTHING)
        if shared is not None:
            self._count_read(peer, state)

    def _count_read(self, peer: PeerConnection, state: ServerState) -> None:
        """Note that one more answer in a server's memory was read."""
        state.read += 1
        state.unreported = True
        if not state.read % REPORT_EVERY:
            self._report_read(peer, state)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        if self._states.pop(peer, None) is not None and self._memory is not None:
            self._memory.forget(peer.member)
