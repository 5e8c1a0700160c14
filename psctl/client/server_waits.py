"""The waits of one worker for its servers: for whom and how long, who reads meanwhile, and when to give up.

A wait for one server reads that server's connection itself if its reader thread rests (transport/read_lease.py):
what is waited
for is then here without another thread. All other waits sleep until a reader thread finds them over. A wait ends when
nothing is missing any more, when the servers refuse to go on, when a server has had no connection for `patience`
seconds and no other took its place, or when it has not said a word for so long although it was asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from psctl.client.server_links import Links
from psctl.clock import Clock
from psctl.errors import ConnectionFailed, JobFailed, PeerLost, TimedOut
from psctl.ps.dense.client.dense_client_state import ClientMind
from psctl.ps.messages import Refused, Why
from psctl.types import ServerAt

TICK = 1.0
"""Seconds between two looks at a wait: who is lost, who must be asked."""

LOOK = 0.05
"""The same where the wait reads by itself: what ends it on another connection is seen then."""

ASK_EVERY = 5.0
"""Seconds between two questions to a server that keeps us waiting."""


class Waiting:
    """See the module's docstring.

    Args:
        mind: whose refusal ends every wait.
        links: to the servers.
        lock: the mind's; all but `until` is called under it, and `until` takes it.
        patience: seconds that a server may be silent although it was asked, or be without a connection.
    """

    def __init__(self, mind: ClientMind, links: Links, lock: threading.RLock, clock: Clock, patience: float) -> None:
        self.seconds = 0.0
        """Spent in waits."""
        self.at: tuple[str, set[int]] = ("", set())
        """What is waited for, and from which servers."""
        self._mind, self._links, self._clock, self._patience = mind, links, clock, patience
        self._lock: Any = lock
        self._changed = threading.Condition(lock)
        self._missing: Callable[[], set[int]] | None = None  # of who sleeps: empty when the wait is over
        self._heard: dict[int, float] = {}

    def until(self, what: str, clock: int, missing: Callable[[], set[int]]) -> None:
        """Block until `missing` names no server any more.

        Args:
            what: is waited for, for messages.
            clock: that it is of.
            missing: called under the lock.

        Raises:
            PeerLost: a server is lost and nobody took its place; names it and its address.
            TimedOut: a server is silent; names it and its address.
            JobFailed: the servers refuse to go on; the message says why and whose fault it is.
        """
        with self._lock:
            if self._mind.refused is not None:
                raise refusal(self._mind.refused)
            if not (servers := missing()):
                return
            began = asked = self._clock.now()
            try:
                while True:
                    self.at = what, servers
                    over = self._pass_time(servers, missing)
                    if self._mind.refused is not None:
                        raise refusal(self._mind.refused)
                    if over or not (servers := missing()):
                        return
                    if self._clock.now() - asked >= min(ASK_EVERY, self._patience / 3):
                        asked = self._clock.now()
                        for server in servers:
                            self._links.send(server, Why(clock), urgent=True)
                    self._raise_if_silent(servers, began, what)
            finally:
                self.at = "", set()
                self.seconds += self._clock.now() - began

    def heard(self, server: int, peer: Any) -> None:
        """Take in that a server has said something, which was taken in; wake who waits if his wait is over."""
        self._heard[server] = self._clock.now()
        if self._missing is None:
            return
        if self._mind.refused is not None:
            self._changed.notify_all()
        elif not self._missing():  # only then: a wake-up costs more than a message
            if self.at[1] == {server}:
                peer.offer_turn()
            self._changed.notify_all()

    def look(self) -> None:
        """Have every wait look whether it is over."""
        self._changed.notify_all()

    def _pass_time(self, servers: set[int], missing: Callable[[], set[int]]) -> bool:
        """Read, or sleep, until the wait may be over or must look; tell whether it is known to be over."""
        peer = self._links.take_turn(servers)
        if peer is None:
            self._missing = missing
            try:
                self._changed.wait(TICK)
            finally:
                self._missing = None
            return False
        self._lock.release()
        try:
            return peer.read_here(lambda: self._over(missing), LOOK)
        finally:
            self._lock.acquire()

    def _over(self, missing: Callable[[], set[int]]) -> bool:
        with self._lock:
            return not missing() or self._mind.refused is not None

    def _raise_if_silent(self, servers: set[int], began: float, what: str) -> None:
        for server in servers:
            silent = self._clock.now() - max(began, self._heard.get(server, began))
            if silent > self._patience:
                raise silence(server, self._links.at(server), self._links.error(server), silent, what)


def refusal(refused: Refused) -> JobFailed:
    """Return the error that ends a wait when the servers refuse to go on."""
    return JobFailed(refused.reason, refused.hint)


def silence(
    server: int, at: ServerAt | None, error: ConnectionFailed | None, silent: float, what: str
) -> PeerLost | TimedOut:  # fmt: skip
    """Return the error that ends the wait for a server.

    Args:
        server: its rank.
        at: where it is, if that is known.
        error: why there is no connection to it; None: there is one.
        silent: seconds for which it has said nothing.
        what: it was asked for.
    """
    name, where = f"server/{server}" + (f" at {at.address}" if at is not None else ""), f"server/{server}"
    if error is not None:
        why = f"{name} is lost since {silent:.0f} s, and no other took its place: {error.message}"
        lost = PeerLost(why, where=where)
        lost.__cause__ = error
        return lost
    return TimedOut(
        f"{name} has not said a word for {silent:.0f} s while it was asked for {what}",
        f"look at the log of server/{server}",
        where=where,
    )
