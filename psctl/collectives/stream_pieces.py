"""Pieces between hosts: sent in parts over TCP streams; each part is received into the buffer that is posted.

Early parts. A rank can be ahead of another by a vector, so parts may arrive before their buffer is posted. They are
buffered and get no credit until it is posted: a sender stops when they fill its window, so they take at most about the
window and one part of memory. This cannot deadlock: pieces are sent in the order of steps, and each rank posts the
buffers of a step before it waits for a piece of that step. So of all awaited pieces, those of the earliest step follow
only parts with posted buffers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from psctl.errors import ConnectionFailed, ProtocolError, PsctlError
from psctl.permits import WireMessage
from psctl.transport.peer_connection import PeerConnection
from psctl.types import PeerBytes

PART = 512 * 1024
"""Bytes of a piece that one message has."""

EARLY_PART_CREDIT = 2048
"""Bytes of credit withheld for an early part beyond its own."""


class PiecePart(msgspec.Struct, frozen=True, tag=True):
    """Payload: the bytes from `offset` on of a piece of `size` bytes. `number` counts this sender's parts."""

    tag: int
    offset: int
    size: int
    number: int


PlaneKinds = PiecePart


class PostedPiece:
    """A piece that is sent or expected; `done` when it is sent, or has arrived.

    Args:
        place: the buffer that it is sent from or received into; None: it arrives before a buffer is posted.
        size: in bytes.
    """

    __slots__ = ("at", "buffered", "done", "kept", "place", "size", "wanted")

    def __init__(self, place: memoryview | None, size: int) -> None:
        self.place = place
        self.size = size
        self.done = False
        self.at = 0
        """Bytes that have arrived."""
        self.wanted = size
        """Bytes that a thread waits for."""
        self.buffered = False
        """The part that is being received has a buffer of its own: no place was posted when it began."""
        self.kept: list[memoryview] = []
        """Early parts, in order."""


class HostStreams:
    """The TCP streams of one process, and the handler of all of them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # reentrant: a sender may write its stream itself
        """The lock and condition of these streams, and of the data plane that is made of them while messages arrive."""
        self._wake_poller: Callable[[], None] = lambda: None
        self.peers: dict[int, PeerConnection] = {}
        self._ended: dict[int, str] = {}
        self._closed = ""
        """Why all streams are closed, those too that are made later; "" while they are not."""
        self._number = 0
        self._sending: dict[int, PostedPiece] = {}  # by the number of the last part
        self._expected: dict[tuple[int, int], deque[PostedPiece]] = {}
        self._early: dict[tuple[int, int], deque[PostedPiece]] = {}
        self._filling: dict[tuple[int, int], PostedPiece] = {}

    def begin(self, wake_poller: Callable[[], None]) -> None:
        """Set the function that wakes a polling thread, before any thread polls."""
        self._wake_poller = wake_poller

    # ---- with the lock -------------------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, data: memoryview) -> PostedPiece:
        """Queue a piece for sending; the result is `done` when it is written."""
        posted = PostedPiece(data, len(data))
        to = self.peers[peer]
        for offset in range(0, len(data), PART):
            self._number += 1
            part = data[offset : offset + PART]
            if offset + len(part) == len(data):
                self._sending[self._number] = posted
            to.send(PiecePart(tag, offset, len(data), self._number), part)
        return posted

    def expect(self, peer: int, tag: int, place: memoryview) -> PostedPiece:
        """Post the buffer for the next piece of a peer with this tag; the result is `done` when it has arrived."""
        early = self._early.get((peer, tag))
        if not early:
            posted = PostedPiece(place, len(place))
            self._expected.setdefault((peer, tag), deque()).append(posted)
            return posted
        posted = early.popleft()
        if posted.size != len(place):
            raise RuntimeError(f"worker/{peer} sent a piece of {posted.size} bytes, expected {len(place)}")
        start = 0
        for part in posted.kept:
            place[start : start + len(part)] = part
            start += len(part)
        self.peers[peer].release_credit(start + EARLY_PART_CREDIT * len(posted.kept))
        posted.place = place
        posted.kept = []
        return posted

    def end_reason(self, peer: int) -> str:
        """Return why the stream to a peer has ended; "" while it has not."""
        return self._ended.get(peer, "")

    @property
    def bytes_by_peer(self) -> dict[str, PeerBytes]:
        """Bytes that were sent to each worker and received from it."""
        found = list(self.peers.items())
        return {f"worker/{rank}": PeerBytes(peer.bytes_sent, peer.bytes_received) for rank, peer in found}

    # ---- the handler: each peer's reader and writer thread -------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Add a stream; one whose handshake ended after `close` is closed."""
        peer.on_written = self._written
        with self.changed:
            self.peers[peer.member.rank] = peer
            late = self._closed
            self.changed.notify_all()
        if late:
            peer.close(late)

    def receive_buffer_for(self, peer: PeerConnection, message: PiecePart, size: int) -> memoryview | None:
        """Return the buffer for a part: in its piece's place, or a new one when none is posted."""
        key = peer.member.rank, message.tag
        with self.changed:
            if message.offset == 0 and key not in self._filling:
                self._filling[key] = self._next(key, message.size)
            piece = self._filling.get(key)
            stop = message.offset + size
            if piece is None or (piece.size, piece.at) != (message.size, message.offset) or stop > piece.size:
                what = f"bytes {message.offset} to {stop} of a piece of {message.size}"
                raise ProtocolError(f"it sent {what}, which are not the next bytes of a piece")
            if size > PART:
                raise ProtocolError(f"it sent a part of {size} bytes, more than {PART}")
            piece.buffered = piece.place is None
            return piece.place[message.offset : stop] if piece.place is not None else memoryview(bytearray(size))

    def _next(self, key: tuple[int, int], size: int) -> PostedPiece:
        expected = self._expected.get(key)
        if expected:
            return expected.popleft()
        early = PostedPiece(None, size)
        self._early.setdefault(key, deque()).append(early)
        return early

    def on_message(self, peer: PeerConnection, message: PiecePart, payload: memoryview | None) -> None:
        """Count a part that has arrived, and keep it or copy it if it has a buffer of its own."""
        if payload is None:
            raise ProtocolError("it sent an empty part")
        key = peer.member.rank, message.tag
        with self.changed:
            piece = self._filling[key]
            start, piece.at = piece.at, piece.at + len(payload)
            if piece.place is None:
                piece.kept.append(payload)
                peer.withhold_credit(len(payload) + EARLY_PART_CREDIT)
            elif piece.buffered:
                piece.place[start : piece.at] = payload
            if piece.at == piece.size:
                piece.done = True
                del self._filling[key]
            elif piece.at < piece.wanted:
                return
            self.changed.notify_all()
        self._wake_poller()

    def _written(self, message: WireMessage, size: int) -> None:
        assert isinstance(message, PiecePart), "nothing else is sent here"
        with self.changed:
            posted = self._sending.pop(message.number, None)
            if posted is None:
                return
            posted.done = True
            self.changed.notify_all()
        self._wake_poller()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Record the end of a stream, and wake waiting threads."""
        with self.changed:
            self._ended[peer.member.rank] = error.message
            self.changed.notify_all()
        self._wake_poller()

    # ---- the end -------------------------------------------------------------------------------------------------

    def await_all(self, ranks: set[int], timeout: float) -> set[int]:
        """Wait until there is a stream to each of these ranks; return the ranks without one after `timeout`."""
        with self.changed:
            self.changed.wait_for(lambda: ranks <= self.peers.keys(), timeout)
            return ranks - self.peers.keys()

    def close(self, reason: str, patience: float) -> None:
        """Close all streams, after queued messages are sent if that takes at most `patience` seconds."""
        with self.changed:
            self._closed = self._closed or reason
            peers = list(self.peers.values())
        for peer in peers:
            try:
                if patience:
                    peer.flush(patience)
            except PsctlError:
                pass  # the peer has closed the stream
            peer.close(reason)
        if patience:
            self.join(patience)  # a thread inside torch when the interpreter ends would abort the process

    def join(self, timeout: float) -> bool:
        """Wait until the threads of all streams, which are closed, have ended; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        ended = [peer.join(max(0.0, deadline - time.monotonic())) for peer in list(self.peers.values())]
        return all(ended)
