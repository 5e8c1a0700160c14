"""How a worker's end of a store reaches servers: over connections, or within this process when there is no job.

Both bring whole messages, in order, to whoever listens. A connection that breaks is made anew, and the listener begins
a new session with that server (what was under way is sent again, and taken in once); a server that cannot be reached
for PATIENCE seconds is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from psctl.errors import ConnectionFailed, PsctlError
from psctl.runtime.functions import JobFunctions
from psctl.store.table import TableMind
from psctl.store.table_packing import Assembly, in_parts
from psctl.words import Member, ServerAt

PATIENCE = 20.0
"""Seconds in which a broken connection must be made anew."""

AGAIN = 0.25
"""Seconds between two attempts."""

LARGEST = 1 << 32
"""Bytes of an answer that are taken in."""

NOTHING = memoryview(b"")


class Listener(Protocol):
    """Who hears servers; called on any thread, of one server always in order."""

    def connected(self, server: int, attach: Callable[[], None]) -> None:
        """A connection is there (again): call `attach`, after which `send` takes it, and begin a session."""

    def heard(self, server: int, message: Any, payload: memoryview) -> None:
        """A whole message."""

    def gone(self, server: int, error: ConnectionFailed) -> None:
        """A server is lost for good."""


class Links(Protocol):
    """The way to all servers, shared by all stores of a process."""

    servers: list[int]
    """Their ranks."""

    def open(self, store: str, listener: Listener) -> None:
        """Connect to all servers, where that is still to be done, and tell who listens for a store."""

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
        self.servers = [0]
        self._mind = TableMind(0, JobFunctions())
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
        servers: who they are and where their tables listen.
        dial: connects: (member, address, handler) -> Peer; raises ConnectionFailed.
    """

    def __init__(self, servers: Sequence[ServerAt], dial: Callable[[Member, Any, Any], Any]) -> None:
        self._at = {each.rank: each for each in servers}
        self.servers = sorted(self._at)
        self._dial = dial
        self._lock = threading.Lock()
        self._peers: dict[int, Any] = {}
        self._begun: set[tuple[str, int]] = set()
        self._listeners: dict[str, Listener] = {}
        self._closed = threading.Event()

    def open(self, store: str, listener: Listener) -> None:
        with self._lock:
            self._listeners[store] = listener
            there = dict(self._peers)
        for server in self.servers:
            if server in there:
                self._begin(store, listener, server)
            else:
                self._connect(server)

    def send(self, store: str, server: int, message: Any, payload: memoryview | None) -> None:
        with self._lock:
            peer = self._peers.get(server) if (store, server) in self._begun else None
        if peer is not None:
            for part, data in in_parts(message, payload):
                peer.send(part, data)

    def name(self, server: int) -> str:
        return f"server/{server} at {self._at[server].address}"

    def end(self, store: str, flush: float) -> None:
        for peer in list(self._peers.values()):
            with suppress(PsctlError):  # it is gone: nobody misses what was not taken
                peer.flush(flush)
        with self._lock:
            self._listeners.pop(store, None)

    def close(self, reason: str) -> None:
        self._closed.set()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close(reason)
        for peer in peers:  # a thread inside torch when the interpreter ends would abort the process
            peer.join(5.0)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _connect(self, server: int) -> None:
        at = self._at[server]
        peer = self._dial(Member("server", server, at.incarnation), at.address, _End(self, server))
        with self._lock:
            self._peers[server] = peer
            listeners = dict(self._listeners)
        for store, listener in listeners.items():
            self._begin(store, listener, server)

    def _begin(self, store: str, listener: Listener, server: int) -> None:
        """Have a store begin its session; until then nothing of it goes to that server."""

        def attach() -> None:
            with self._lock:
                self._begun.add((store, server))

        listener.connected(server, attach)

    def broken(self, server: int, error: ConnectionFailed) -> None:
        """A connection ended: make it anew on a thread of its own, for this one ends with the connection."""
        with self._lock:
            self._peers.pop(server, None)
            self._begun = {each for each in self._begun if each[1] != server}
        if not self._closed.is_set():
            threading.Thread(target=self._again, args=(server,), name=f"redial {server}", daemon=True).start()

    def _again(self, server: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._closed.wait(AGAIN):
            try:
                self._connect(server)
                return
            except ConnectionFailed as problem:
                if time.monotonic() >= deadline:
                    for listener in list(self._listeners.values()):
                        listener.gone(server, problem)
                    return

    def hear(self, server: int, message: Any, payload: memoryview) -> None:
        """Bring a whole message to its store."""
        with self._lock:
            listener = self._listeners.get(message.store)
        if listener is not None:
            listener.heard(server, message, payload)


class _End:
    """What one server's connection tells; called on that connection's reader thread."""

    def __init__(self, links: Dialled, server: int) -> None:
        self._links, self._server = links, server
        self._parts = Assembly(LARGEST)

    def joined(self, peer: Any) -> None:
        """Nothing to do: this end dialled."""

    def place(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return self._parts.place(message, size)

    def received(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        whole = self._parts.received(message, 0 if payload is None else len(payload))
        if whole is not None:
            self._links.hear(self._server, *whole)

    def lost(self, peer: Any, error: ConnectionFailed) -> None:
        self._links.broken(self._server, error)
