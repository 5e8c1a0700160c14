"""Memory shared by the processes of one host: segments made by their agent and passed to the agent's children only.

A segment is a memfd: it has no name in any file system, so only processes that received its descriptor can open it, and
the kernel frees it when the last process that maps it has ended, however it ends. Its size is sealed before a process
maps it: a peer that could shrink it could end the others by SIGBUS.

Each child of an agent inherits one end of a Unix socket pair. The child sends requests on it: to make a segment, which
the child then *holds*, or to get a segment that another child holds, by (member, number). Numbers are never reused. The
agent keeps a descriptor of each segment until its holder drops it or ends; a process that has mapped a segment keeps
the memory until it unmaps it.

Two members are on the same host if and only if one can get the other's segment: boot ids and addresses do not prove it.
Other processes may write to a segment at any time: never read a size or an offset that must be valid from it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import threading

import msgspec

from psctl.errors import PeerLost, ProtocolError
from psctl.types import UNDECODABLE, Member

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

MOST = 256
"""Segments that one member may hold; each takes a descriptor of the agent."""

LONGEST = 4096
"""Bytes of a request or an answer."""


class Make(msgspec.Struct, frozen=True, tag=True):
    """A request to make a segment of `size` bytes. The answer is Made with its descriptor, or Absent."""

    size: int


class Get(msgspec.Struct, frozen=True, tag=True):
    """A request for segment `number` of `holder`. The answer is Made with its descriptor, or Absent."""

    holder: Member
    number: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """A request to release the sender's segment `number`. The answer is Absent."""

    number: int


class Made(msgspec.Struct, frozen=True, tag=True):
    """The answer with a segment; its descriptor travels with the message."""

    number: int
    size: int


class Absent(msgspec.Struct, frozen=True, tag=True):
    """The answer without a segment, and the reason."""

    why: str


_REQUESTS = msgspec.msgpack.Decoder(Make | Get | Drop)
_ANSWERS = msgspec.msgpack.Decoder(Made | Absent)
_encode = msgspec.msgpack.Encoder().encode


class Segment:
    """A segment that is mapped into this process.

    Args:
        holder: the member that holds it.
        number: its number among the holder's segments.
        descriptor: of the memfd; the caller closes it.
        size: bytes.

    Raises:
        OSError: it cannot be mapped.
        ValueError: its size is another, or is not sealed.
    """

    def __init__(self, holder: Member, number: int, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size != size or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"segment {number} of {holder} does not have a sealed size of {size} bytes")
        self.holder = holder
        self.number = number
        self.size = size
        mapped = mmap.mmap(descriptor, size)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory uses small ones
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(mapped)
        """All bytes of the segment; the mapping lasts as long as any view of them."""

    def part(self, offset: int, size: int) -> memoryview:
        """Return the bytes [offset, offset + size).

        Raises:
            ProtocolError: they are not all inside the segment; the fault of the member that sent the offset.
        """
        if not 0 <= offset <= offset + size <= self.size:
            what = f"bytes [{offset}, {offset + size}) of a segment of {self.size}"
            raise ProtocolError(f"{self.holder}: named {what}", where=str(self.holder))
        return self.memory[offset : offset + size]


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
        with end, contextlib.suppress(OSError):  # the child has ended, or the broker has shut the socket down
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
            problem = f"{size} bytes asked for, {self._largest} possible; {len(held)} segments held, {MOST} possible"
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


class SegmentClient:
    """A child's end: requests segments from the agent, and maps them. May be called by any thread.

    Args:
        me: this process.
        end: its end of the pair; None: the process has no agent, and can have no segments.
    """

    def __init__(self, me: Member, end: socket.socket | None) -> None:
        self.me = me
        self._end = end
        self._lock = threading.Lock()

    def make(self, size: int) -> Segment | None:
        """Return a new segment that this process holds; None when the agent cannot make one.

        Raises:
            PeerLost: the agent has ended, so this process will be killed.
        """
        return self._ask(Make(size), self.me)

    def get(self, holder: Member, number: int) -> Segment | None:
        """Return a segment that another child of the same agent holds; None when there is no such one on this host.

        Raises:
            PeerLost: as `make`.
        """
        return self._ask(Get(holder, number), holder)

    def drop(self, number: int) -> None:
        """Release a segment: no other process can get it any more.

        Raises:
            PeerLost: as `make`.
        """
        self._ask(Drop(number), self.me)

    def _ask(self, message: Make | Get | Drop, holder: Member) -> Segment | None:
        if self._end is None:
            return None
        with self._lock:
            answer, descriptors = self._exchange(self._end, message)
        try:
            if isinstance(answer, Absent) or not descriptors:
                return None
            return Segment(holder, answer.number, descriptors[0], answer.size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _exchange(self, end: socket.socket, message: Make | Get | Drop) -> tuple[Made | Absent, list[int]]:
        try:
            end.sendall(_encode(message))
            data, ancillary, _, _ = end.recvmsg(LONGEST, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"the agent of {self.me} has ended: {error.strerror}", where=str(self.me)) from error
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not data:
            raise PeerLost(f"the agent of {self.me} has ended", where=str(self.me))
        return _ANSWERS.decode(data), list(descriptors)

    def close(self) -> None:
        """Close the connection to the agent; mapped segments stay."""
        if self._end is not None:
            self._end.close()


def inherited(me: Member, descriptor: int | None) -> SegmentClient:
    """Return the client of a process that inherited `descriptor` from its agent; None: it has no agent."""
    if descriptor is None:
        return SegmentClient(me, None)
    os.set_inheritable(descriptor, False)  # children of the process do not inherit it
    return SegmentClient(me, socket.socket(fileno=descriptor))
