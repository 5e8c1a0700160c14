"""The agent's end of shared memory (transport/shared_memory.py): makes segments, and keeps which child holds which.

Each child has a socket pair to the agent, and a thread of the agent that answers its requests.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import psutil

from psctl.transport.shared_memory import LONGEST, SEALS, Absent, Drop, Get, Made, Make
from psctl.types import UNDECODABLE, Member

OFF = "PSCTL_SHARED_MEMORY"
"""Environment variable of the agent: with the value "off" processes share no memory and send all bytes; for
measurements and debugging."""

MOST = 256
"""Segments that one member may hold; each takes a descriptor of the agent."""

_REQUESTS = msgspec.msgpack.Decoder(Make | Get | Drop)
_encode = msgspec.msgpack.Encoder().encode


def memfd(size: int) -> int:
    """Return the descriptor of new memory whose size can never change.

    Raises:
        OSError: the system refuses.
    """
    descriptor = os.memfd_create("psctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection between an agent and a child, which keeps the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SegmentServer:
    """The agent's end: makes segments, and keeps which member holds which. May be called by any thread.

    Args:
        largest: bytes that a segment may have, at most.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._lock = threading.Lock()
        self._held: dict[Member, dict[int, tuple[int, int]]] = {}  # number -> descriptor, size
        self._next: dict[Member, int] = {}

    def serve(self, member: Member, end: socket.socket) -> None:
        """Answer a child's requests until it closes its end, on the calling thread. `ended` releases its segments."""
        with self._lock:
            self._held.setdefault(member, {})
        with end, suppress(OSError):  # the child has ended, or the broker has shut the socket down
            while request := end.recv(LONGEST):
                answer, descriptor = self._answer(member, request)
                rights = [descriptor] if descriptor is not None else []
                try:
                    socket.send_fds(end, [_encode(answer)], rights)
                finally:
                    for each in rights:
                        os.close(each)

    def ended(self, member: Member) -> None:
        """Release all segments of a member that has ended."""
        with self._lock:
            for descriptor, _ in self._held.pop(member, {}).values():
                os.close(descriptor)
            self._next.pop(member, None)

    def _answer(self, member: Member, request: bytes) -> tuple[Made | Absent, int | None]:
        """Return the answer and the descriptor to send with it, which the caller closes."""
        try:
            message = _REQUESTS.decode(request)
        except UNDECODABLE as error:
            return Absent(f"an invalid request: {error}"), None
        with self._lock:
            held = self._held.get(member)
            if held is None:
                return Absent(f"{member} has ended"), None
            match message:
                case Make():
                    return self._make(member, held, message.size)
                case Get():
                    descriptor, size = self._held.get(message.holder, {}).get(message.number, (-1, 0))
                    if descriptor < 0:
                        return Absent(f"{message.holder} holds no segment {message.number} on this host"), None
                    return Made(message.number, size), os.dup(descriptor)
            descriptor, _ = held.pop(message.number, (-1, 0))
            if descriptor >= 0:
                os.close(descriptor)
            return Absent("dropped"), None

    def _make(self, member: Member, held: dict[int, tuple[int, int]], size: int) -> tuple[Made | Absent, int | None]:
        if not 0 < size <= self._largest or len(held) >= MOST:
            problem = f"{size} bytes requested, {self._largest} possible; {len(held)} segments held, {MOST} possible"
            return Absent(problem), None
        number = self._next.get(member, 0)
        try:
            descriptor = memfd(size)
            given = os.dup(descriptor)
        except OSError as error:
            return Absent(f"the host cannot make it: {error.strerror}"), None
        self._next[member] = number + 1
        held[number] = descriptor, size
        return Made(number, size), given


class SegmentBroker:
    """Serves shared memory segments to an agent's children; called on the agent's main thread."""

    def __init__(self) -> None:
        wanted = os.environ.get(OFF) != "off"
        self._segments = SegmentServer(psutil.virtual_memory().total if wanted else 0)
        self._ends: dict[Member, socket.socket] = {}

    @contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Open a child's socket pair; yields the end that the child inherits, and closes it here afterwards."""
        ours, theirs = pair()
        with theirs:
            self._ends[member] = ours
            threading.Thread(
                target=self._segments.serve, args=(member, ours), name=f"psctl segments {member}", daemon=True
            ).start()
            yield theirs.fileno()

    def ended(self, member: Member) -> None:
        """Release the segments of a child that has ended or could not be started."""
        end = self._ends.pop(member, None)
        if end is not None:
            with suppress(OSError):  # its thread has read the end of file and closed it
                end.shutdown(socket.SHUT_RDWR)
        self._segments.ended(member)
