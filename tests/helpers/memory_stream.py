"""Streams within one process, with faults: a link that is cut silently, a killed end, a flipped bit."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from psctl.errors import ConnectionFailed
from psctl.transport.connect import HALF_OPEN, PATIENCE, Acceptor, Allow, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.transport.protocol.frames import Bytes
from psctl.transport.stream import Stream
from psctl.types import Address, Member, Role

CAPACITY = 4 << 20


class Pipe:
    """One direction of a link: bytes written at one end, read at the other.

    Args:
        silence: seconds after a cut until a waiting end fails with a timeout.
    """

    def __init__(self, silence: float) -> None:
        self._changed = threading.Condition()
        self._parts: deque[memoryview] = deque()
        self._size = 0
        self.silence = silence
        self._cut_at: float | None = None
        self._writer_closed = False  # the writer is done
        self._ended = False  # and the reader can know
        self._reader_closed = False  # the reader is done
        self._refusing = False  # and the writer can know
        self._reset = False
        self._flip = 0
        self.on_change: Callable[[], None] | None = None
        """Called without a lock after bytes or the end have arrived."""

    def silent_for(self) -> float:
        """Return the seconds since the cut; 0 without one."""
        return 0.0 if self._cut_at is None else time.monotonic() - self._cut_at

    def has(self, least: int) -> bool:
        """Return whether `least` bytes or the end have arrived."""
        with self._changed:
            return self._size >= least or self._ended or self._reader_closed or self._reset

    def _notify(self) -> None:
        on_change = self.on_change  # `forget` may clear it meanwhile
        if on_change is not None:
            on_change()

    def write(self, data: memoryview, limit: float | None, *, block: bool = True) -> bool:
        """Add a copy of `data`; return False when there is no room and `block` is false."""
        with self._changed:
            deadline = None if limit is None else time.monotonic() + limit
            while True:
                if self._reset or self._writer_closed or self._refusing:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
                if self._size + len(data) <= CAPACITY or not self._size:
                    break
                if not block:
                    return False
                self._wait(deadline)
            if self._cut_at is None:
                self._parts.append(memoryview(self._flipped(bytes(data))))
                self._size += len(data)
                self._changed.notify_all()
        self._notify()
        return True

    def _flipped(self, data: bytes) -> bytes:
        if not self._flip or not data:
            return data
        self._flip -= 1
        return bytes([*data[:-1], data[-1] ^ 1])

    def read(self, buffer: memoryview, limit: float | None) -> int:
        """Wait for bytes and copy them into `buffer`; return their number, 0 at the end."""
        with self._changed:
            deadline = None if limit is None else time.monotonic() + limit
            while not self._parts:
                if self._reset and not self._reader_closed:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                if self._ended or self._reader_closed:
                    return 0
                self._wait(deadline)
            part = self._parts[0]
            count = min(len(part), len(buffer))
            buffer[:count] = part[:count]
            if count == len(part):
                self._parts.popleft()
            else:
                self._parts[0] = part[count:]
            self._size -= count
            self._changed.notify_all()
            return count

    def arrives(self, seconds: float) -> bool:
        """Wait until `read` would return; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(self._readable, seconds)

    def _readable(self) -> bool:
        silent = self._cut_at is not None and time.monotonic() >= self._cut_at + self.silence
        return bool(self._parts) or self._reset or self._ended or self._reader_closed or silent

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change, at most until the deadline or until a cut is detected."""
        now = time.monotonic()
        silent = None if self._cut_at is None else self._cut_at + self.silence
        if silent is not None and now >= silent:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if deadline is not None and now >= deadline:
            raise TimeoutError("timed out")
        ends = [moment - now for moment in (deadline, silent) if moment is not None]
        self._changed.wait(min(ends) if ends else None)

    def end(self) -> None:
        """Close the writing end: the reader gets the end after the last byte."""
        with self._changed:
            self._writer_closed = True
            self._ended = self._ended or self._cut_at is None
            self._changed.notify_all()
        self._notify()

    def close_reader(self) -> None:
        """Close the reading end: the reader gets the end after the bytes that have arrived, and writes fail."""
        with self._changed:
            self._reader_closed = True
            self._refusing = self._refusing or self._cut_at is None
            self._changed.notify_all()
        self._notify()

    def reset(self) -> None:
        """Reset the connection at both ends."""
        with self._changed:
            self._reset = True
            self._changed.notify_all()
        self._notify()

    def cut(self) -> None:
        """Drop all further bytes, without an event at either end."""
        with self._changed:
            self._cut_at = time.monotonic()
            self._changed.notify_all()

    def flip(self) -> None:
        """Change one bit of the next bytes."""
        with self._changed:
            self._flip += 1


class MemoryStream:
    """One end of a link in memory."""

    def __init__(self, name: str, window: int, incoming: Pipe, outgoing: Pipe) -> None:
        self.name = name
        self.window = window
        self.incoming, self._outgoing = incoming, outgoing
        self._limit: float | None = None
        self.silence = incoming.silence

    def tolerate(self, silence: float) -> None:
        self.silence = self.incoming.silence = self._outgoing.silence = silence

    def silent_for(self) -> float:
        return self.incoming.silent_for()

    def send(self, data: memoryview) -> None:
        for start in range(0, len(data), CAPACITY):
            self._outgoing.write(data[start : start + CAPACITY], self._limit)

    def send_parts(self, parts: Sequence[Bytes]) -> int:
        for part in parts:
            self.send(memoryview(part))
        return sum(map(len, parts))

    def send_now(self, data: memoryview) -> int:
        return len(data) if self._outgoing.write(data, self._limit, block=False) else 0

    def in_flight(self) -> int:
        return 0

    def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        return self.incoming.read(buffer, self._limit)

    def arrives(self, seconds: float) -> bool:
        return self.incoming.arrives(seconds)

    def limit(self, seconds: float | None) -> None:
        self._limit = seconds

    def shutdown(self) -> None:
        self._outgoing.end()
        self.incoming.close_reader()

    def close(self) -> None:
        self.shutdown()


class Link:
    """Both directions between the end that dialled and the end that accepted, with the faults to inject."""

    def __init__(self, address: Address, window: int, silence: float) -> None:
        self._there, self._back = Pipe(silence), Pipe(silence)
        self.address = address
        self.dialled = MemoryStream(str(address), window, self._back, self._there)
        self.accepted = MemoryStream(f"{address} (dialled)", window, self._there, self._back)

    def cut(self) -> None:
        """Cut the link silently: further bytes are lost, and both ends detect it after `silence` seconds."""
        self._there.cut()
        self._back.cut()

    def kill(self) -> None:
        """Reset both ends, as after a kill."""
        self._there.reset()
        self._back.reset()

    def flip(self, *, back: bool = False) -> None:
        """Change one bit of the next bytes from the dialling end, or with `back` of the next to it."""
        (self._back if back else self._there).flip()


class MemoryListener:
    """Accepts the links to one address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[MemoryStream] = deque()
        self._awaited: dict[MemoryStream, int] = {}
        self.closed = False

    def offer(self, stream: MemoryStream) -> None:
        """Queue the accepting end of a new link."""
        with self._changed:
            if self.closed:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self._waiting.append(stream)
            self._changed.notify_all()

    def accept(self, seconds: float | None = None) -> MemoryStream | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self.closed:
                    raise OSError(errno.EINVAL, "the listener was closed")
                if self._waiting:
                    return self._waiting.popleft()
                for stream, least in self._awaited.items():
                    if stream.incoming.has(least):
                        self.forget(stream)
                        return stream
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def await_bytes(self, stream: Stream, least: int) -> None:
        assert isinstance(stream, MemoryStream), "it came from here"
        with self._changed:
            self._awaited[stream] = least
        stream.incoming.on_change = self._on_stream_change

    def forget(self, stream: Stream) -> None:
        assert isinstance(stream, MemoryStream), "it came from here"
        stream.incoming.on_change = None
        with self._changed:
            self._awaited.pop(stream)

    def _on_stream_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            for stream in self._waiting:
                stream.shutdown()
            self._waiting.clear()
            self._changed.notify_all()


class MemoryNetwork:
    """A network within one process: the same peers, handshakes and seals over streams in memory.

    Args:
        window: bytes that each end buffers; with a small window messages arrive in parts.
        silence: seconds after a cut until both ends detect it.
    """

    def __init__(self, window: int = 2 << 20, silence: float = 5.0) -> None:
        self._window, self._silence = window, silence
        self._lock = threading.Lock()
        self._listeners: dict[Address, MemoryListener] = {}
        self._members: dict[Address, Member] = {}
        self._links: list[tuple[Member, Link]] = []

    def connect(self, address: Address, timeout: float = PATIENCE, congestion: str = "auto") -> MemoryStream:
        """Return the dialling end of a new link, without a handshake."""
        return self._link(address).dialled

    def _link(self, address: Address) -> Link:
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        link = Link(address, self._window, self._silence)
        listener.offer(link.accepted)
        return link

    def listen(self, host: str, ports: tuple[int, int] | None, congestion: str = "auto") -> MemoryListener:
        """Return a listener on the next port."""
        with self._lock:
            address = Address(host, len(self._listeners) + 1)
            self._listeners[address] = MemoryListener(address)
            return self._listeners[address]

    def dial(
        self,
        address: Address,
        credentials: Credentials,
        expect: Member | Role,
        kinds: Any,
        handler: ConnectionHandler,
        timeout: float = PATIENCE,
        congestion: str = "auto",
        *,
        sealed: bool = True,
    ) -> PeerConnection:
        """As `psctl.transport.connect.dial`, over this network."""

        def connect(address: Address, timeout: float, congestion: str) -> MemoryStream:
            link = self._link(address)
            with self._lock:
                self._links.append((credentials.member, link))
            return link.dialled

        return dial(address, credentials, expect, kinds, handler, timeout, congestion, sealed=sealed, connect=connect)

    def acceptor(
        self,
        credentials: Credentials,
        kinds: Any,
        handler: ConnectionHandler,
        allow: Allow = lambda member: None,
        *,
        refused: Callable[[str, ConnectionFailed], None] | None = None,
        patience: float = PATIENCE,
        half_open: int = HALF_OPEN,
        sealed: bool = True,
    ) -> Acceptor:
        """As `psctl.transport.connect.Acceptor`, on this network."""
        made = Acceptor(
            "memory", None, credentials, kinds, handler, allow,
            refused=refused, patience=patience, half_open=half_open, sealed=sealed, listen=self.listen,
        )  # fmt: skip
        with self._lock:
            self._members[made.address] = credentials.member
        return made

    def kill(self, member: Member) -> None:
        """Kill all links of a member, as the end of its process does."""
        with self._lock:
            links = [link for dialler, link in self._links if member in (dialler, self._members.get(link.address))]
        for link in links:
            link.kill()

    def link(self, one: Member, other: Member) -> Link:
        """Return the newest link between two members, to cut it, kill it, or flip its bits."""
        with self._lock:
            for dialler, link in reversed(self._links):
                if {dialler, self._members.get(link.address)} == {one, other}:
                    return link
        raise LookupError(f"no link between {one} and {other}")
