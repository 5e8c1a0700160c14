"""The machinery under a worker's end of a store: the lock, the mind, the links, tickets and waiting.

Threads. One lock around the mind (ps/tables/client/table_client_state.py) and the links. Connections' reader threads
and the script's
threads take it; what is sent under it is only queued. Callbacks run after it is let go. Every wait looks around each
second: a store that servers refuse to go on with ends it (JobFailed), a shard that nobody leads for PATIENCE seconds
ends it (PeerLost), a server that says nothing for so long although it was asked ends it (TimedOut); slow workers
elsewhere do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psctl.errors import JobFailed, PeerLost, TimedOut, UsageError
from psctl.kv.store_connections import Links
from psctl.kv.tickets import Tasks, Ticket
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import StoreSpec
from psctl.ps.tables.client.calls_in_flight import Change, Out
from psctl.ps.tables.client.table_client_state import TableClient
from psctl.ps.tables.client.unacked_calls import NOBODY
from psctl.ps.tables.table_state import FOREVER, first_of

TICK = 1.0
"""Seconds between two looks at a wait."""

PATIENCE = 60.0
"""Seconds that a server may be silent although it was asked, and that a shard may be without a server."""

KEPT = 256 << 20
"""Bytes of pushes that may be under way; a push beyond waits."""

INTERNAL = 1 << 40
"""Where the numbers of tickets begin that the store makes for itself."""


class Where(Protocol):
    """Where a run is."""

    @property
    def place(self) -> int:
        """A number that never falls, and changes from step to step."""

    @property
    def marked(self) -> int:
        """The newest step at whose end the run has passed the place where checkpoints are taken."""

    def settle(self) -> bool:
        """Where nobody takes a lost worker's place, return True once the steps that ended here are sure to count."""


class StoreEnd:
    """What `Store` stands on.

    Args:
        spec: the store's.
        rank: this worker's.
        links: the way to servers.
        at: where the run is.
        functions: reductions and users' functions.
        after: the last sequence of the same store's end before, which was closed; -1: there was none.
    """

    def __init__(
        self, spec: StoreSpec, rank: int, links: Links, at: Where, functions: JobFunctions, after: int = -1
    ) -> None:
        self.name = spec.name
        self.rank = rank
        self._spec, self._links, self._at = spec, links, at
        self._functions = functions
        self._marked = at.marked if rank in spec.group else FOREVER
        self._mind = TableClient(spec, rank, self._functions, max(after, first_of(at.place) - 1), links.room)
        self._changed = threading.Condition(threading.RLock())
        self._tasks = Tasks()
        self._numbers, self._internal = 0, INTERNAL
        self._ended: dict[int, Any] = {}  # internal tickets that have finished
        self._results: dict[int, Callable[[], Any]] = {}
        self._heard: dict[int, float] = {}
        self._callbacks: list[Callable[[], Any]] = []
        self._waits: list[Callable[[], bool]] = []  # what ends the wait of each thread that waits
        self._closed = False
        links.open(spec.name, self)
        with self._changed:
            self._wait_until(f"store {spec.name!r}", lambda: self._mind.opened, self._all)

    def _send_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._send(self._mind.send(change, self._at.place))

    def _ticket(self, what: str, callback: Callable[[Any], Any] | None) -> Ticket:
        self._numbers += 1
        ticket = Ticket(self._numbers, what, self._wait_ticket)
        return ticket.then(callback) if callback is not None else ticket

    def mark(self, step: int) -> None:
        """Say that what was pushed so far belongs into the checkpoint of `step`, and what comes now does not.

        A push that waits for others (`after`, `delay`) begins later, so it is waited for first.
        """
        with self._changed:
            if self._closed or self.rank not in self._spec.group:
                return
            self._wait_until("pushes that wait for others", lambda: self._tasks.begun, set)
            self._marked = step
            self._send(self._mind.mark(self._at.place, step))

    @property
    def last(self) -> int:
        """The sequence of the newest update."""
        return self._mind.last

    def _own_ticket(self) -> int:
        self._internal += 1
        return self._internal

    # ---- inside: waiting -----------------------------------------------------------------------------------------

    def _wait_for_room(self) -> None:
        self._wait_until("room for a push", lambda: self._mind.outstanding.kept < KEPT, self._all)

    def _wait_ticket(self, ticket: Ticket, timeout: float | None) -> Any:
        with self._changed:
            shards = lambda: self._mind.waiting_for(ticket.number)  # noqa: E731
            self._wait_until(ticket.what, lambda: ticket.done, shards, timeout)
        self._call_back()
        return ticket.result

    def _wait_internal(self, what: str, ticket: int) -> None:
        self._wait_until(what, lambda: ticket in self._ended, lambda: self._mind.waiting_for(ticket))
        del self._ended[ticket]

    def _all(self) -> set[int]:
        return set(range(self._spec.shards))

    def _wait_until(
        self, what: str, done: Callable[[], bool], shards: Callable[[], set[int]], timeout: float | None = None
    ) -> None:
        if done():
            return
        self._send(self._mind.flush())
        self._waits.append(done)
        try:
            self._wait_long(what, done, shards, timeout)
        finally:
            self._waits.remove(done)

    def _wait_long(
        self, what: str, done: Callable[[], bool], shards: Callable[[], set[int]], timeout: float | None
    ) -> None:
        began = asked = led = time.monotonic()
        while not done():
            self._raise_if_over()
            left = TICK if timeout is None else min(TICK, began + timeout - time.monotonic())
            if left <= 0:
                raise TimedOut(f"{what} did not finish within {timeout:g} s: {self._whom(shards())}")
            self._changed.wait(left)
            now = time.monotonic()
            if now - asked >= TICK:
                asked = now
                servers = self._mind.leaders(shards())
                led = led if NOBODY in servers else now
                if now - led > PATIENCE:
                    raise PeerLost(f"no server has led a part of store {self.name!r} for {now - led:.0f} s ({what})")
                for server in servers - {NOBODY}:
                    self._ask(server, what, began, now)

    def _ask(self, server: int, what: str, began: float, now: float) -> None:
        """Ask a server that is waited for who keeps it, and look whether it answers."""
        self._send([self._mind.ask(server)])
        silent = now - max(began, self._heard.get(server, began))
        if silent > PATIENCE:
            name = self._links.name(server)
            raise TimedOut(f"{name} has not said a word for {silent:.0f} s while it was asked for {what}")

    def _whom(self, shards: set[int]) -> str:
        servers = self._mind.leaders(shards)
        late = sorted({rank for server in servers for rank in self._mind.because.get(server, [])})
        names = ", ".join(self._links.name(server) for server in sorted(servers - {NOBODY}))
        behind = f", which wait for the clock of {', '.join(f'worker/{rank}' for rank in late)}" if late else ""
        return f"waiting for {names or ('a server' if servers else 'other tasks')}{behind}"

    @property
    def doing(self) -> str:
        """Whom the store waits for, for people."""
        behind = self._mind.behind()
        return self._whom(behind) if behind else ""

    def _raise_if_over(self) -> None:
        refused = self._mind.refused
        if refused is not None:
            raise JobFailed(refused.reason, refused.hint)

    # ---- inside: what happens ------------------------------------------------------------------------------------

    def connected(self, server: int, attach: Callable[[], None]) -> None:
        """Begin a session with a server (called by the links)."""
        with self._changed:
            attach()
            self._heard[server] = time.monotonic()
            self._send(self._mind.anew(server, self._marked))

    def heard(self, server: int, message: Any, payload: memoryview) -> None:
        """Take in a message of a server (called by the links)."""
        with self._changed:
            self._heard[server] = time.monotonic()
            self._send(self._mind.received(server, message, payload))
            self._go_on()
            if self._mind.refused is not None or any(done() for done in self._waits):
                self._changed.notify_all()  # a thread that is woken for nothing costs more than all of the above
        self._call_back()

    def _send(self, outs: Sequence[Out]) -> None:
        for out in outs:
            self._links.send(self.name, out.server, out.message, out.payload)

    def _go_on(self) -> None:
        """Finish tickets that are done and begin what waited for them; under the lock."""
        self._tasks.run()
        mind = self._mind
        while mind.finished:
            done, mind.finished = mind.finished, []
            for number in done:
                if number >= INTERNAL:
                    self._ended[number] = True
                    continue
                ticket = self._tasks.finished(number)
                if number in mind.rows:
                    result: Any = mind.rows.pop(number).clone()
                else:
                    made = self._results.pop(number, None)
                    result = made() if made is not None else None
                if ticket is not None:
                    self._callbacks += ticket.finish(result)
            self._tasks.run()

    def _check(self, *, writes: bool = False) -> None:
        if self._closed:
            raise UsageError(f"store {self.name!r} is closed", "open it again with run.store()")
        self._raise_if_over()
        if writes and self.rank not in self._spec.group:
            raise UsageError(f"worker/{self.rank} is not of the group of store {self.name!r}, and may only pull")

    def _call_back(self) -> None:
        """Call what was asked to be called; the lock is free."""
        while self._callbacks:
            self._callbacks.pop(0)()
