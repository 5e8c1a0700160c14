"""Waits of a worker's threads for the answers of servers, and their time limits.

A thread that waits for one server reads its connection directly if the read lease is free (ReadLease): the answer then
needs no other thread. All other waits block until a reader thread finds their condition true, and so do all waits where
other workers forward values, which come over other connections. A wait ends when its condition is true, when the
servers refuse to go on, when a server has had no connection for `patience` seconds and no other took its place, or when
a server has sent nothing for so long in spite of queries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from psctl.clock import Clock
from psctl.errors import ConnectionFailed, JobFailed, PeerLost, TimedOut
from psctl.ps.messages import Refused
from psctl.ps.tables.client.calls_in_flight import NO_SERVER
from psctl.transport.peer_connection import PeerConnection

TICK = 1.0
"""Seconds between two checks of a waiting thread for lost servers, and two queries for the workers that delay them."""

LOOK = 0.05
"""The same for a thread that reads a connection: it then notices events of other connections that end its wait."""


class InFlightTimer:
    """Measures how long requests are in flight, whether or not a thread waits for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self.seconds = 0.0
        """Seconds so far, of the periods that have ended."""
        self.ended_at = 0.0
        """When the last period ended."""

    def start(self) -> None:
        """Note that a request is sent; a period starts unless one is open."""
        if self._since is None:
            self._since = self._clock.now()

    def stop(self) -> None:
        """Note that all requests are answered: the open period ends."""
        if self._since is not None:
            self.ended_at = self._clock.now()
            self.seconds += self.ended_at - self._since
            self._since = None


class ClientState(Protocol):
    """The client state machine that waits for answers."""

    @property
    def refused(self) -> Refused | None:
        """The message `Refused` of either protocol, None while the servers go on."""

    @property
    def wait_reasons(self) -> Mapping[int, Sequence[int]]:
        """By server: the workers that it waits for, as it answered last."""


class Servers(Protocol):
    """The methods of ServerConnections that waits use."""

    def acquire_read_lease(self, servers: Collection[int]) -> PeerConnection | None: ...
    def error(self, server: int) -> ConnectionFailed | None: ...
    def name_of(self, server: int) -> str: ...


class ServerWaits:
    """The waits of one client. All methods are called under its lock.

    Args:
        lock: guards the state; a thread that waits holds it once.
        state: the client's; its refusal ends every wait.
        servers: their connections.
        clock: the machine's time.
        patience: seconds that a server may leave queries unanswered, or be without a connection.
        reads: waiting threads read connections.
    """

    def __init__(
        self, lock: threading.RLock, state: ClientState, servers: Servers, clock: Clock, patience: float,
        *, reads: bool = True,
    ) -> None:  # fmt: skip
        self.seconds = 0.0
        """Seconds spent in waits."""
        self.at: tuple[str, set[int]] = ("", set())
        """What is waited for, and from which servers."""
        self.changed = threading.Condition(lock)
        self._lock = lock
        self._state, self._servers, self._clock, self._patience = state, servers, clock, patience
        self._reads = reads
        self._conditions: list[Callable[[], bool]] = []  # the condition of each blocked thread
        self._last: dict[int, float] = {}  # by server: when its last message arrived

    def until(
        self,
        what: str,
        servers: Callable[[], set[int]],
        ask: Callable[[int], object],
        done: Callable[[], bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Block until a wait is over; called under the lock.

        Args:
            what: the object of the wait, for messages.
            servers: returns the ranks of the servers that are waited for; NO_SERVER where no server leads a shard.
            ask: sends a server the query which workers it waits for.
            done: returns whether the wait is over; None: it is when `servers` returns none.
            timeout: seconds; None: as long as servers answer.

        Raises:
            PeerLost: a server is lost and no other took its place; names it and its address.
            TimedOut: a server is silent, or `timeout` passed; names it.
            JobFailed: the servers refuse to go on; the message has the reason.
        """
        done = done or (lambda: not servers())
        self.raise_if_refused()
        if done():
            return
        began = asked = led = self._clock.now()
        stop = done if timeout is None else lambda: done() or self._clock.now() >= began + timeout
        try:
            while True:
                waited = servers()
                self.at = what, waited
                left = TICK if timeout is None else min(TICK, began + timeout - self._clock.now())
                if left <= 0:
                    raise TimedOut(f"{what} did not finish within {timeout:g} s: {self.describe(waited)}")
                over = self._read_or_block(waited, stop, left)
                self.raise_if_refused()
                if (over and stop is done) or done():
                    return
                now, waited = self._clock.now(), servers()
                led = led if NO_SERVER in waited else now
                waited.discard(NO_SERVER)
                if now - asked >= min(TICK, self._patience / 3):
                    asked = now
                    for server in waited:
                        ask(server)
                self._raise_if_silent(waited, began, led, what)
        finally:
            self.at = "", set()
            self.seconds += self._clock.now() - began

    def on_message(self, server: int, peer: PeerConnection | None) -> None:
        """Record that a server's message was processed; wake the waiting threads if a wait is over."""
        self._last[server] = self._clock.now()
        if self._conditions:
            self.on_progress(peer if self._reads and self.at[1] == {server} else None)

    def on_progress(self, peer: PeerConnection | None = None) -> None:
        """Wake the waiting threads if a wait is over; `peer`: a connection that one of them may read from now on."""
        if not self._conditions:
            return
        if self._state.refused is not None:
            self.changed.notify_all()
        elif any(done() for done in self._conditions):  # only then: a wake-up costs more than a message
            if peer is not None:
                peer.offer_lease()
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake every waiting thread, to check its condition."""
        self.changed.notify_all()

    def describe(self, servers: Collection[int]) -> str:
        """Return servers, and the workers that they wait for, for people."""
        late = sorted({worker for server in servers for worker in self._state.wait_reasons.get(server, [])})
        names = ", ".join(
            f"server/{server}{' (no connection)' if self._servers.error(server) else ''}"
            for server in sorted(servers)
            if server != NO_SERVER
        )
        behind = f", which waits for {', '.join(f'worker/{rank}' for rank in late)}" if late else ""
        return (names or ("a server" if servers else "other tasks")) + behind

    def _read_or_block(self, servers: Collection[int], done: Callable[[], bool], seconds: float) -> bool:
        """Read the server's connection, or block; return True when `done()` was found true."""
        peer = self._servers.acquire_read_lease(servers) if self._reads else None
        if peer is None:
            self._conditions.append(done)
            try:
                self.changed.wait(seconds)
            finally:
                self._conditions.remove(done)
            return False
        self._lock.release()
        try:
            return peer.read_here(lambda: self._is_over(done), min(LOOK, seconds))
        finally:
            self._lock.acquire()

    def _is_over(self, done: Callable[[], bool]) -> bool:
        with self._lock:
            return done() or self._state.refused is not None

    def raise_if_refused(self) -> None:
        """Raise JobFailed with the servers' reason if they refuse to go on."""
        refused = self._state.refused
        if refused is not None:
            raise JobFailed(refused.reason, refused.hint)

    def _raise_if_silent(self, servers: Collection[int], began: float, led: float, what: str) -> None:
        now = self._clock.now()
        if now - led > self._patience:
            raise PeerLost(f"no server has led a part of this for {now - led:.0f} s: {what}")
        for server in servers:
            silent = now - max(began, self._last.get(server, began))
            if silent <= self._patience:
                continue
            name, where = self._servers.name_of(server), f"server/{server}"
            error = self._servers.error(server)
            if error is not None:
                why = f"{name} is lost since {silent:.0f} s, and no other took its place: {error.message}"
                raise PeerLost(why, where=where) from error
            raise TimedOut(
                f"{name} has sent nothing for {silent:.0f} s while it was asked for {what}",
                f"look at the log of server/{server}",
                where=where,
            )
