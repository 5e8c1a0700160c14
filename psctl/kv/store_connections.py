"""How a worker's end of a store reaches servers: over connections, or within this process when there is no job.

Both bring whole messages, in order, to whoever listens. Connections are to the servers that the coordinator names
(server_links.py); one that breaks is made anew while it names them, and the listener begins a new session with that
server: what was under way is said again to whoever leads its shard, and taken in once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from psctl.client import server_links
from psctl.client.shared_buffers import SharedRows
from psctl.errors import ConnectionFailed, ProtocolError
from psctl.job.table_server_messages import TablesAt
from psctl.process.user_functions import JobFunctions
from psctl.ps.messages import IsNear
from psctl.ps.table_messages import Back
from psctl.ps.tables.server.held_answers import Send
from psctl.ps.tables.server.table_server import TableMind
from psctl.ps.tables.table_packing import Assembly, Room, in_parts, private
from psctl.types import Member, ServerAt

SHARDS = 4
"""Shards of a store within one process."""

LARGEST = 1 << 32
"""Bytes of an answer that are taken in."""

FLUSH = 1.0
"""Seconds in which what was queued leaves when all is closed."""

OWED = 8
"""Answers that were read and are not given back yet, at most; fewer go back with what is said next."""

NOTHING = memoryview(b"")


class Listener(Protocol):
    """Who hears servers; called on any thread, of one server always in order."""

    def connected(self, server: int, attach: Callable[[], None]) -> None:
        """A connection is there (again): call `attach`, after which `send` takes it, and begin a session."""

    def heard(self, server: int, message: Any, payload: memoryview) -> None:
        """A whole message."""


class Links(Protocol):
    """The way to all servers, shared by all stores of a process."""

    shards: int
    """How many a store has."""

    @property
    def room(self) -> Room:
        """Where the memory of long messages comes from."""

    def open(self, store: str, listener: Listener) -> None:
        """Tell who listens for a store: sessions begin with all servers that there are, now and later."""

    def send(self, store: str, server: int, message: Any, payload: memoryview | None) -> None:
        """Queue a message; never blocks. To a server that is not there it goes nowhere: `connected` follows."""

    def name(self, server: int) -> str:
        """Return a server in words."""

    def end(self, store: str, flush: float) -> None:
        """A store is closed: what it sent leaves first, for at most `flush` seconds."""

    def close(self, reason: str) -> None:
        """End all connections."""


class Within:
    """One server in this process. Messages are answered at once, on the thread that sends."""

    def __init__(self) -> None:
        self.shards = SHARDS
        self.room: Room = private
        self._mind = TableMind(0, JobFunctions(), SHARDS)
        self._mind.assigned(0, [[0]] * SHARDS, [[]] * SHARDS, [0])
        self._mind.begin(restored=False)
        self._queue: deque[tuple[Any, memoryview | None]] = deque()
        self._busy = False
        self._listeners: dict[str, Listener] = {}

    def open(self, store: str, listener: Listener) -> None:
        self._listeners[store] = listener
        listener.connected(0, lambda: None)

    def send(self, store: str, server: int, message: Any, payload: memoryview | None) -> None:
        self._queue.append((message, payload))
        if self._busy:  # an answer that makes the listener send: it waits its turn
            return
        self._busy = True
        try:
            while self._queue:
                asked, data = self._queue.popleft()
                for answer in self._mind.received(0, asked, data if data is not None else NOTHING):
                    assert isinstance(answer, Send), "there is no other server"
                    data = answer.payload if answer.payload is not None else NOTHING
                    self._listeners[answer.message.store].heard(0, answer.message, data)
        finally:
            self._busy = False

    def name(self, server: int) -> str:
        return "this process"

    def end(self, store: str, flush: float) -> None:
        del self._listeners[store]

    def close(self, reason: str) -> None:
        return


class Dialled:
    """Connections to the servers of a job.

    Args:
        first: who they are, as the coordinator first said.
        dial: connects: (member, address, handler) -> Peer; raises ConnectionFailed.
        unreachable: told of a server that could not be reached.
        memory: what servers of this host read, and theirs; None: all bytes are sent.
    """

    def __init__(
        self, first: TablesAt, dial: Callable[[Member, Any, Any], Any],
        unreachable: Callable[[ServerAt, ConnectionFailed], Any] = lambda at, error: None,
        memory: SharedRows | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.shards = first.shards
        self.room: Room = private if memory is None else memory.allocate
        self._links = server_links.Links(
            lambda at: dial(server_links.named(at), at.address, _End(self, at)), unreachable
        )
        self._lock = threading.Lock()
        self._epoch = -1
        self._up: set[int] = set()
        self._begun: set[tuple[str, int]] = set()
        self._owed: dict[int, int] = {}  # by server: answers of its memory that were read, which it is to be told
        self._listeners: dict[str, Listener] = {}
        self.assigned(first)

    def assigned(self, at: TablesAt) -> None:
        """Take over who the servers are; what is older than the newest says nothing. Called on one thread."""
        with self._lock:
            if at.epoch <= self._epoch:
                return
            self._epoch = at.epoch
        self._links.assigned(at.servers)  # waits for connections to end, whose last act takes the lock

    def open(self, store: str, listener: Listener) -> None:
        with self._lock:
            self._listeners[store] = listener
            there = sorted(self._up)
        for server in there:
            self._begin(store, listener, server)

    def send(self, store: str, server: int, message: Any, payload: memoryview | None) -> None:
        if (store, server) in self._begun:
            if server in self._owed:
                self._give_back(server)
            lent = self.memory.lend(server, message, payload) if self.memory is not None else None
            for part, data in in_parts(message, payload) if lent is None else [(lent, None)]:
                self._links.send(server, part, data)

    def read(self, at: ServerAt, peer: Any, answers: int) -> None:
        """So many answers that a server lent on this connection are read; it is told with what is said next."""
        if self._links.serves(at, peer):
            self._owed[at.rank] = answers
            if not answers % OWED:
                self._give_back(at.rank)

    def _give_back(self, server: int) -> None:
        with self._lock:  # whoever counts more says it later
            answers = self._owed.pop(server, None)
            if answers is not None:
                self._links.send(server, Back(answers), None)

    def name(self, server: int) -> str:
        at = self._links.at(server)
        return f"server/{server} at {at.address}" if at is not None else f"server/{server}"

    def end(self, store: str, flush: float) -> None:
        self._links.flush(flush)
        with self._lock:
            self._listeners.pop(store, None)

    def close(self, reason: str) -> None:
        self._links.close(reason, FLUSH)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, store: str, listener: Listener, server: int) -> None:
        """Have a store begin its session; until then nothing of it goes to that server."""

        def attach() -> None:
            with self._lock:  # connections to several servers come up at once
                self._begun = self._begun | {(store, server)}

        listener.connected(server, attach)

    def up(self, at: ServerAt, peer: Any) -> None:
        """A connection is made: all stores begin their sessions.

        Raises:
            ProtocolError: nobody wants it any more.
        """
        with self._lock:
            if not self._links.up(at, peer):  # sessions on the connection in use go on
                raise ProtocolError(f"server/{at.rank} is not of the newest assignment, or has a connection already")
            self._begun = {each for each in self._begun if each[1] != at.rank}
            self._owed.pop(at.rank, None)  # of the connection before
            there = dict(self._listeners)
            self._up.add(at.rank)
        for store, listener in there.items():
            self._begin(store, listener, at.rank)

    def down(self, at: ServerAt, peer: Any, error: ConnectionFailed) -> None:
        """A connection is over; it is made again while the server is wanted."""
        with self._lock:
            if self._links.serves(at, peer):
                self._up.discard(at.rank)
                self._begun = {each for each in self._begun if each[1] != at.rank}
        self._links.down(at, peer, error)

    def hear(self, server: int, message: Any, payload: memoryview) -> None:
        """Bring a whole message to its store."""
        with self._lock:
            listener = self._listeners.get(message.store)
        if listener is not None:
            listener.heard(server, message, payload)


class _End:
    """What one server's connection tells; called on that connection's reader thread."""

    def __init__(self, dialled: Dialled, at: ServerAt) -> None:
        self._dialled, self._at = dialled, at
        self._parts = Assembly(LARGEST)
        self._read = 0  # answers that were lent

    def on_connected(self, peer: Any) -> None:
        """Take it into use."""
        if self._dialled.memory is not None:
            self._dialled.memory.offer(peer)
        self._dialled.up(self._at, peer)

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return self._parts.place(message, size)

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        memory = self._dialled.memory
        if memory is not None and (isinstance(message, IsNear) or getattr(message, "at", None) is not None):
            lent = memory.lent_bytes(peer, message)
            if lent is not None:
                self._dialled.hear(self._at.rank, message, lent)
                self._read += 1
                self._dialled.read(self._at, peer, self._read)
            return
        whole = self._parts.received(message, 0 if payload is None else len(payload))
        if whole is not None:
            self._dialled.hear(self._at.rank, *whole)

    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None:
        if self._dialled.memory is not None:
            self._dialled.memory.forget(peer.member)
        self._dialled.down(self._at, peer, error)
