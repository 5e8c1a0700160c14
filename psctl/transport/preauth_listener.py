"""The door of a listener: callers are greeted and waited for, and come in once they have shown the job's knock.

One thread serves it, and a caller that has shown nothing costs a descriptor and a few microseconds, whatever it does:
no thread, no buffer, no TLS. When there are more of them than `most`, the oldest of the address that has most of them
is dropped, without waiting. So a flood from one address makes room at its own cost only: callers of other addresses
have as many round trips as they need, up to the deadline.
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
"""Callers that have shown nothing yet and are waited for; each holds a descriptor."""
BRIEF = 0.01
"""Seconds to wait, at most, for what `accept` has said to be there."""


class Caller(NamedTuple):
    """Somebody who was greeted."""

    greeting: bytes
    deadline: float


class PreauthListener:
    """Lets in who shows the knock.

    Args:
        listener: where streams come in.
        secret: the job's knock.
        patience: seconds for a caller's answer.
        refused: told of each caller that does not come in: (its end, why); ProtocolError where it answered wrongly.
        most: callers that are waited for at once.
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
        self._callers: dict[Stream, Caller] = {}  # oldest first
        self._by_source: dict[str, dict[Stream, None]] = {}  # the same, by address; none is empty
        self._answer = bytearray(preauth.ANSWER)

    def next(self) -> Stream:
        """Wait for the next caller that has shown the knock; called by one thread.

        Raises:
            OSError: the listener was closed, or the system lacks means for a while.
        """
        while True:
            stream = self._listener.accept(self._drop_late())
            if stream is None:
                continue
            caller = self._forget(stream)
            if caller is None:
                self._greet(stream)
            elif self._has_shown(stream, caller):
                return stream

    def clear(self) -> None:
        """Drop all who are waited for; by the thread that calls `next`, once the listener is closed."""
        for stream in list(self._callers):
            self._drop(stream, "the listener was closed")

    def _drop_late(self) -> float | None:
        """Drop who took too long; return the seconds until the next one has, None where nobody is waited for."""
        while self._callers:
            stream, caller = next(iter(self._callers.items()))
            left = caller.deadline - time.monotonic()
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

    def _forget(self, stream: Stream) -> Caller | None:
        """Take a stream out of those that are waited for; None where it was not one of them."""
        caller = self._callers.pop(stream, None)
        if caller is not None:
            crowd = self._by_source[_source(stream)]
            del crowd[stream]
            if not crowd:
                del self._by_source[_source(stream)]
        return caller

    def _greet(self, stream: Stream) -> None:
        if len(self._callers) >= self._most:
            crowd = max(self._by_source.values(), key=len)
            self._drop(next(iter(crowd)), "it has shown nothing and made room for others")
        greeting = preauth.greet()
        with contextlib.suppress(OSError):  # gone
            if stream.send_now(memoryview(greeting)) == len(greeting):
                self._listener.await_bytes(stream, preauth.ANSWER)
                self._callers[stream] = Caller(greeting, time.monotonic() + self._patience)
                self._by_source.setdefault(_source(stream), {})[stream] = None
                return
        self._drop(stream, "it ended before it was greeted")

    def _has_shown(self, stream: Stream, caller: Caller) -> bool:
        have, count = 0, 1
        with contextlib.suppress(OSError):  # reset; or a wake-up for nothing, which no member's stream gives
            stream.limit(BRIEF)
            while count and have < preauth.ANSWER:
                count = stream.receive_into(memoryview(self._answer)[have:])
                have += count
        if have < preauth.ANSWER:
            self._drop(stream, "it ended before it had shown this job's knock")
        elif not preauth.holds(self._secret, caller.greeting, bytes(self._answer)):
            self._drop(stream, "it has not this job's knock: a stranger, or a process of another job", ProtocolError)
        else:
            return True
        return False


def _source(stream: Stream) -> str:
    """Return the address of a stream's other end, without the port."""
    return stream.name.rpartition(":")[0]


def send_preauth_answer(stream: Stream, secret: str, deadline: float) -> None:
    """Answer the greeting of who was dialled.

    Args:
        stream: just connected.
        secret: the job's knock.
        deadline: when it must be there, by `time.monotonic`.

    Raises:
        ProtocolError: something else speaks there.
        PeerLost: it ended before it had greeted.
        OSError: as streams do; TimeoutError at the deadline.
    """
    heard = bytearray(preauth.GREETING)
    have = 0
    while have < len(heard):
        stream.limit(max(0.001, deadline - time.monotonic()))
        count = stream.receive_into(memoryview(heard)[have:])
        if not count:
            raise PeerLost("it ended the connection without a word")
        have += count
        preauth.check_greeting(bytes(heard[:have]))
    stream.send(memoryview(preauth.answer(secret, bytes(heard))))
