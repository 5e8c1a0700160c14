"""Memory that processes of one host share: made by their agent, passed to its own children only, gone with its holder.

A segment is a memfd: it has no name in any file system, so nobody can open it who was not handed its descriptor, and
the kernel frees it when the last process that maps it has ended, in whatever way. Its size is sealed before anyone
maps it: a peer that could shrink it would kill us with SIGBUS.

Each child of an agent inherits one end of a Unix socket pair. On it the child has segments made, which it then *holds*,
and asks for those that other children hold, by (member, number); numbers count up and never come again. The agent keeps
a descriptor of each until its holder has ended; who has mapped a segment keeps its memory until he lets go of it.

That a member's segment can be had is the test of being on the same host: boot ids and addresses say less. What others
write there may change under our eyes: read no size and no offset from shared memory that must be right.
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
from psctl.types import Member

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

MOST = 256
"""Segments that one member may hold; a descriptor in the agent each."""

LONGEST = 4096
"""Bytes of a request or an answer."""


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make me a segment of `size` bytes. Answered by Made, with its descriptor."""

    size: int


class Get(msgspec.Struct, frozen=True, tag=True):
    """Give me the segment that `holder` calls `number`. Answered by Made, with its descriptor, or by Absent."""

    holder: Member
    number: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """I hold my segment `number` no longer. Answered by Absent."""

    number: int


class Made(msgspec.Struct, frozen=True, tag=True):
    """Here it is."""

    number: int
    size: int


class Absent(msgspec.Struct, frozen=True, tag=True):
    """There is none, and why."""

    why: str


_ASKED = msgspec.msgpack.Decoder(Make | Get | Drop)
_ANSWERED = msgspec.msgpack.Decoder(Made | Absent)
_encode = msgspec.msgpack.Encoder().encode


class Segment:
    """A segment as one process has it mapped.

    Args:
        holder: the member that had it made.
        number: its name among those of the holder.
        descriptor: of the memfd; it stays the caller's.
        size: bytes.

    Raises:
        OSError: it cannot be mapped; ValueError: it is not what its maker says.
    """

    def __init__(self, holder: Member, number: int, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size != size or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"segment {number} of {holder} is not of {size} bytes for good")
        self.holder, self.number, self.size = holder, number, size
        mapped = mmap.mmap(descriptor, size)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory takes small ones
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(mapped)
        """All of its bytes; the mapping lasts as long as any view of them does."""

    def part(self, offset: int, size: int) -> memoryview:
        """Return the bytes [offset, offset + size).

        Raises:
            ProtocolError: they are not all inside; the fault of whoever named them.
        """
        if not 0 <= offset <= offset + size <= self.size:
            what = f"bytes [{offset}, {offset + size}) of a segment of {self.size}"
            raise ProtocolError(f"{self.holder}: named {what}", where=str(self.holder))
        return self.memory[offset : offset + size]


def memfd(size: int) -> int:
    """Return the descriptor of new memory whose size can never change. OSError: the system refuses."""
    descriptor = os.memfd_create("psctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection between an agent and a child; datagrams, so that messages stay whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SegmentServer:
    """The agent's end: makes segments, and knows who holds which. May be called by any thread.

    Args:
        largest: bytes that a segment may have.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._lock = threading.Lock()
        self._held: dict[Member, dict[int, tuple[int, int]]] = {}  # number -> descriptor, size
        self._next: dict[Member, int] = {}

    def serve(self, member: Member, end: socket.socket) -> None:
        """Answer a child until it closes its end, on the calling thread. What it holds stays until `ended`."""
        with self._lock:
            self._held.setdefault(member, {})
        with end, contextlib.suppress(OSError):  # it has ended, or was ended
            while asked := end.recv(LONGEST):
                answer, descriptor = self._answer(member, asked)
                rights = [descriptor] if descriptor is not None else []
                try:
                    socket.send_fds(end, [_encode(answer)], rights)
                finally:
                    for each in rights:
                        os.close(each)

    def ended(self, member: Member) -> None:
        """Let go of all that a member held: it has ended."""
        with self._lock:
            for descriptor, _ in self._held.pop(member, {}).values():
                os.close(descriptor)
            self._next.pop(member, None)

    def _answer(self, member: Member, asked: bytes) -> tuple[Made | Absent, int | None]:
        """Return the answer, and a descriptor that goes with it: the caller's to close."""
        try:
            message = _ASKED.decode(asked)
        except msgspec.DecodeError as error:
            return Absent(f"not understood: {error}"), None
        with self._lock:
            held = self._held.get(member)
            if held is None:
                return Absent("your agent has seen you end"), None
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
            return Absent(f"{size} bytes, where {self._largest} are possible, beside {len(held)} other segments"), None
        number = self._next.get(member, 0)
        try:
            descriptor = memfd(size)
            given = os.dup(descriptor)
        except OSError as error:
            return Absent(f"the host has none: {error.strerror}"), None
        self._next[member] = number + 1
        held[number] = descriptor, size
        return Made(number, size), given


class SegmentClient:
    """A child's end: has segments made, and maps those of others. May be called by any thread.

    Args:
        me: this process.
        end: its end of the pair; None: no agent makes segments for it, and it can have none.
    """

    def __init__(self, me: Member, end: socket.socket | None) -> None:
        self.me, self._end = me, end
        self._lock = threading.Lock()

    def make(self, size: int) -> Segment | None:
        """Return a new segment that this process holds; None when it cannot have one.

        Raises:
            PeerLost: the agent is gone, and this process's end is near.
        """
        return self._ask(Make(size), self.me)

    def get(self, holder: Member, number: int) -> Segment | None:
        """Return a segment that another child of the same agent holds; None when there is no such one on this host.

        Raises:
            PeerLost: as `make`.
        """
        return self._ask(Get(holder, number), holder)

    def drop(self, number: int) -> None:
        """Hold a segment no longer: nobody can get it any more.

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
            raise PeerLost(f"the agent of {self.me} is gone: {error.strerror}", where=str(self.me)) from error
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not data:
            raise PeerLost(f"the agent of {self.me} is gone", where=str(self.me))
        return _ANSWERED.decode(data), list(descriptors)

    def close(self) -> None:
        """Ask for no more; what is mapped stays."""
        if self._end is not None:
            self._end.close()


def inherited(me: Member, descriptor: int | None) -> SegmentClient:
    """Return the segments of a process that inherited `descriptor` from its agent; None: it has no such agent."""
    if descriptor is None:
        return SegmentClient(me, None)
    os.set_inheritable(descriptor, False)  # not for what the process starts in turn
    return SegmentClient(me, socket.socket(fileno=descriptor))
