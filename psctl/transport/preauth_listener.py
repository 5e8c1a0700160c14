"""The preauth stage of a listener: sends greetings, and returns the connections that answered correctly.

One thread serves it. A connection that has not answered yet costs a descriptor and a few microseconds, whatever it
sends: no thread, no buffer, no TLS. When more than `most` of them are pending, the oldest of the address that has most
of them is dropped at once. So a flood from one address makes space at its own cost only: connections from other
addresses have as many round trips as they need, up to the deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.transport.protocol import preauth
from psctl.transport.stream import Listener, Stream

MOST = 128
"""Pending connections at most; each holds a descriptor."""
BRIEF = 0.01
"""Seconds to wait, at most, for bytes that `accept` has reported."""


class PendingPreauth(NamedTuple):
    """A connection that was sent a greeting and has not answered."""

    greeting: bytes
    deadline: float


class PreauthListener:
    """Accepts streams whose other end proves the job's secret.

    Args:
        listener: accepts streams.
        secret: the job's preauth secret, in hex.
        patience: seconds for an answer.
        refused: called for each connection that is dropped, with its address and the reason: ProtocolError for a wrong
            answer, PeerLost otherwise.
        most: pending connections at most.
    """

    def __init__(
        self,
        listener: Listener,
        secret: str,
        patience: float,
        refused: Callable[[str, ConnectionFailed], None] | None,
        most: int = MOST,
    ) -> None:
        self._listener, self._secret, self._patience, self._refused = listener, secret, patience, refused
        self._most = most
        self._pending: dict[Stream, PendingPreauth] = {}  # oldest first
        self._by_source: dict[str, dict[Stream, None]] = {}  # the same, by address; none is empty
        self._answer = bytearray(preauth.ANSWER)

    def accept(self) -> Stream:
        """Wait for the next stream that answered correctly; called by one thread.

        Raises:
            OSError: the listener was closed, or the system lacks resources for a while.
        """
        while True:
            stream = self._listener.accept(self._drop_late())
            if stream is None:
                continue
            pending = self._forget(stream)
            if pending is None:
                self._greet(stream)
            elif self._has_answered(stream, pending):
                return stream

    def clear(self) -> None:
        """Drop all pending connections; on the thread that calls `accept`, once the listener is closed."""
        for stream in list(self._pending):
            self._drop(stream, "the listener was closed")

    def _drop_late(self) -> float | None:
        """Drop connections beyond their deadline; return the seconds until the next deadline, None without one."""
        while self._pending:
            stream, pending = next(iter(self._pending.items()))
            left = pending.deadline - time.monotonic()
            if left > 0:
                return left
            self._drop(stream, f"no handshake within {self._patience:g} s")
        return None

    def _drop(self, stream: Stream, why: str, kind: type[ConnectionFailed] = PeerLost) -> None:
        if self._forget(stream) is not None:
            self._listener.forget(stream)
        stream.shutdown()
        stream.close()
        if self._refused is not None:
            self._refused(stream.name, kind(f"{stream.name}: {why}", where=stream.name))

    def _forget(self, stream: Stream) -> PendingPreauth | None:
        """Remove a stream from the pending ones; None where it was not pending."""
        pending = self._pending.pop(stream, None)
        if pending is not None:
            same = self._by_source[_source(stream)]
            del same[stream]
            if not same:
                del self._by_source[_source(stream)]
        return pending

    def _greet(self, stream: Stream) -> None:
        if len(self._pending) >= self._most:
            largest = max(self._by_source.values(), key=len)
            self._drop(next(iter(largest)), "it proved nothing and was dropped for newer connections")
        greeting = preauth.greet()
        with contextlib.suppress(OSError):  # the other end is gone
            if stream.send_now(memoryview(greeting)) == len(greeting):
                self._listener.await_bytes(stream, preauth.ANSWER)
                self._pending[stream] = PendingPreauth(greeting, time.monotonic() + self._patience)
                self._by_source.setdefault(_source(stream), {})[stream] = None
                return
        self._drop(stream, "it ended before the greeting")

    def _has_answered(self, stream: Stream, pending: PendingPreauth) -> bool:
        have, count = 0, 1
        with contextlib.suppress(OSError):  # reset; or a wake-up without bytes, which streams of members do not cause
            stream.limit(BRIEF)
            while count and have < preauth.ANSWER:
                count = stream.receive_into(memoryview(self._answer)[have:])
                have += count
        if have < preauth.ANSWER:
            self._drop(stream, "it ended before it proved this job's secret")
        elif not preauth.is_answer(self._secret, pending.greeting, bytes(self._answer)):
            self._drop(stream, "it did not prove this job's secret: it is not a process of this job", ProtocolError)
        else:
            return True
        return False


def _source(stream: Stream) -> str:
    """Return the address of a stream's other end, without the port."""
    return stream.name.rpartition(":")[0]


def send_preauth_answer(stream: Stream, secret: str, deadline: float) -> None:
    """Answer the greeting of the accepting end.

    Args:
        stream: just connected.
        secret: the job's preauth secret, in hex.
        deadline: for the greeting, by `time.monotonic`.

    Raises:
        ProtocolError: the other end is not a listener of psctl.
        PeerLost: it ended before the greeting.
        OSError: as streams do; TimeoutError at the deadline.
    """
    greeting = bytearray(preauth.GREETING)
    have = 0
    while have < len(greeting):
        stream.limit(max(0.001, deadline - time.monotonic()))
        count = stream.receive_into(memoryview(greeting)[have:])
        if not count:
            raise PeerLost("the connection ended before the greeting")
        have += count
        preauth.check_greeting(bytes(greeting[:have]))
    stream.send(memoryview(preauth.answer(secret, bytes(greeting))))
