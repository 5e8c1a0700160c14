"""Pieces between hosts: in parts over sealed streams, each part opened straight into the place that was posted for it.

What arrives before its place is posted is kept aside; a rank can be ahead of another by no more than the schedule lets
it, which is less than one vector, so this is memory for what one vector sends at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from psctl.errors import ConnectionFailed, PsctlError

PART = 512 * 1024
"""Bytes of a piece that travel in one message."""


class Part(msgspec.Struct, frozen=True, tag=True):
    """Payload: the bytes from `offset` on of a piece of `size` bytes. `number` counts what this sender has sent."""

    tag: int
    offset: int
    size: int
    number: int


PlaneKinds = Part


class Posted:
    """A piece that is sent or expected; `over` when it has left, or is there."""

    __slots__ = ("over", "place", "then")

    def __init__(self, place: memoryview) -> None:
        self.place, self.over = place, False
        self.then: memoryview | None = None
        """Where it goes from there, for it came before its place was posted."""

    def end(self) -> None:
        """It is there, or has left."""
        if self.then is not None:
            self.then[:] = self.place
        self.over = True


class Sealed:
    """The sealed streams of one process, and the handler of all of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._awake: Callable[[], None] = lambda: None
        self._peers: dict[int, Any] = {}
        self._ended: dict[int, str] = {}
        self._closing = False
        self._number = 0
        self._sending: dict[int, Posted] = {}  # by the number of the last part
        self._expected: dict[tuple[int, int], deque[Posted]] = {}
        self._early: dict[tuple[int, int], deque[Posted]] = {}
        self._filling: dict[tuple[int, int], Posted] = {}

    def begin(self, changed: threading.Condition, awake: Callable[[], None]) -> None:
        """Share the lock of who waits, and learn how to wake who polls; before anything is sent."""
        self._changed, self._awake = changed, awake

    # ---- with the lock -------------------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, data: memoryview) -> Posted:
        """Send a piece."""
        posted = Posted(data)
        to = self._peers[peer]
        for offset in range(0, len(data), PART):
            self._number += 1
            part = data[offset : offset + PART]
            if offset + len(part) == len(data):
                self._sending[self._number] = posted
            to.send(Part(tag, offset, len(data), self._number), part)
        return posted

    def expect(self, peer: int, tag: int, place: memoryview) -> Posted:
        """Let the next piece of a peer with this tag arrive in its place."""
        early = self._early.get((peer, tag))
        if not early:
            posted = Posted(place)
            self._expected.setdefault((peer, tag), deque()).append(posted)
            return posted
        there = early[0]
        if there.over:
            early.popleft()
            place[:] = there.place
            return there
        early.popleft()  # it is coming just now: copied when it is whole
        there.then = place
        return there

    def gone(self, peer: int) -> str:
        """Return why nothing more comes from a peer; "" while something may."""
        return self._ended.get(peer, "")

    @property
    def bytes_moved(self) -> int:
        """Bytes that were sent and received."""
        return sum(peer.bytes_sent + peer.bytes_received for peer in list(self._peers.values()))

    # ---- the handler: each peer's reader and writer thread -------------------------------------------------------

    def joined(self, peer: Any) -> None:
        """A stream is made."""
        peer.on_written = self._written
        with self._changed:
            self._peers[peer.member.rank] = peer
            self._changed.notify_all()

    def place(self, peer: Any, message: Part, size: int) -> memoryview | None:
        """Say where a part goes: straight to its place."""
        key = peer.member.rank, message.tag
        with self._changed:
            if message.offset == 0:
                self._filling[key] = self._place_of(key, message.size)
            place = self._filling[key].place if key in self._filling else None
        if place is None or len(place) != message.size or message.offset + size > message.size:
            raise ConnectionFailed(f"{peer.name}: it sent a part that nobody expects")
        return place[message.offset : message.offset + size]

    def _place_of(self, key: tuple[int, int], size: int) -> Posted:
        expected = self._expected.get(key)
        if expected:
            return expected.popleft()
        aside = Posted(memoryview(bytearray(size)))
        self._early.setdefault(key, deque()).append(aside)
        return aside

    def received(self, peer: Any, message: Part, payload: memoryview | None) -> None:
        """A part is in its place."""
        if payload is not None and message.offset + len(payload) == message.size:
            with self._changed:
                self._filling.pop((peer.member.rank, message.tag)).end()
                self._changed.notify_all()
            self._awake()

    def _written(self, message: Part, size: int) -> None:
        with self._changed:
            posted = self._sending.pop(message.number, None)
            if posted is None:
                return
            posted.over = True
            self._changed.notify_all()
        self._awake()

    def lost(self, peer: Any, error: ConnectionFailed) -> None:
        """A stream has ended."""
        with self._changed:
            self._ended[peer.member.rank] = error.message
            self._changed.notify_all()
        self._awake()

    # ---- the end -------------------------------------------------------------------------------------------------

    def await_all(self, ranks: set[int], timeout: float) -> set[int]:
        """Wait until there is a stream to each of these; return those without."""
        with self._changed:
            self._changed.wait_for(lambda: ranks <= self._peers.keys(), timeout)
            return ranks - self._peers.keys()

    def close(self, reason: str, patience: float) -> None:
        """End all streams; what was queued has left first, where that takes no longer than `patience` seconds."""
        self._closing = True
        peers: Mapping[int, Any] = dict(self._peers)
        for peer in peers.values():
            try:
                if patience:
                    peer.flush(patience)
            except PsctlError:
                pass  # it left first
            peer.close(reason)
        if patience:
            for peer in peers.values():  # a thread inside torch when the interpreter ends would abort the process
                peer.join(patience)
