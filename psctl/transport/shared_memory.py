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

This module is the children's end: segments, and the buffers that are cut from them. agent/shm_broker.py is the agent's.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import threading

import msgspec

from psctl.errors import PeerLost, ProtocolError
from psctl.types import Member

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

LONGEST = 4096
"""Bytes of a request or an answer."""

PAGE = 4096

FIRST = 64 << 20
"""Bytes of the first segment at least; each further one is at least twice as large as the one before."""


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


class SharedAllocator:
    """Allocates memory that other processes of this host can read, and reads theirs. May be called by any thread.

    Buffers are cut from segments one after another. A released buffer is reused for the next allocation of its size,
    the latest first, because its pages are in memory. Pages that were never touched take no memory.

    Args:
        segments: makes and finds segments.
        alignment: of the first byte of a buffer, within its segment.
    """

    def __init__(self, segments: SegmentClient, alignment: int = PAGE) -> None:
        self._segments, self._alignment = segments, alignment
        self._lock = threading.Lock()
        self._own: list[tuple[int, Segment]] = []  # with the address of the first byte
        self._filled = 0  # bytes of the newest segment
        self._free: dict[int, list[memoryview]] = {}  # by size; without the lock, for finalizers release buffers
        self._mapped: dict[tuple[Member, int], Segment] = {}

    @property
    def first_segment(self) -> int | None:
        """The number of this process's first segment; None: it has none."""
        with self._lock:
            return self._own[0][1].number if self._own else None

    def allocate(self, size: int, *, zeroed: bool = False) -> memoryview | None:
        """Return a buffer of `size` bytes; None: no shared memory is available.

        Args:
            zeroed: clear a buffer that was used before; new memory is zero anyway.
        """
        part = self.reuse(size)
        if part is None:
            with self._lock:
                return self._cut(size)
        if zeroed:
            ctypes.memset(_address(part), 0, size)
        return part

    def reuse(self, size: int) -> memoryview | None:
        """Return a released buffer of exactly this size; None: there is none."""
        try:
            return self._free.setdefault(size, []).pop()
        except IndexError:
            return None

    def release(self, part: memoryview) -> None:
        """Take back a buffer that nothing reads any more. Takes no lock, so that finalizers may call it."""
        self._free[len(part)].append(part)

    def _cut(self, size: int) -> memoryview | None:
        space = -(-size // self._alignment) * self._alignment
        if not self._own or self._filled + space > self._own[-1][1].size:
            wanted = max(space, 2 * self._own[-1][1].size if self._own else FIRST)
            segment = self._segments.make(wanted) or self._segments.make(space)
            if segment is None:
                return None
            self._own.append((_address(segment.memory), segment))
            self._filled = 0
        part = self._own[-1][1].part(self._filled, size)
        self._filled += space
        return part

    def locate(self, address: int, size: int) -> tuple[int, int] | None:
        """Return (segment number, offset) of bytes of this process; None when they are not in shared memory."""
        for start, segment in self._own:
            if start <= address and address + size <= start + segment.size:
                return segment.number, address - start
        return None

    def read(self, holder: Member, number: int, offset: int, size: int) -> memoryview | None:
        """Return bytes of another process's segment, not to be written; None: it has no such segment on this host.

        Raises:
            ProtocolError: the segment has no such bytes.
            PeerLost: the agent is gone.
        """
        segment = self.map(holder, number)
        return segment.part(offset, size) if segment is not None else None

    def map(self, holder: Member, number: int) -> Segment | None:
        """Return another process's segment; None: it has no such segment on this host. PeerLost: the agent is gone."""
        found = self._mapped.get((holder, number))
        if found is None:
            with self._lock:
                found = self._mapped.get((holder, number)) or self._segments.get(holder, number)
                if found is not None:
                    self._mapped[holder, number] = found
        return found

    def unmap(self, holder: Member) -> None:
        """Forget a process's segments; their memory stays mapped while a view of it exists."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == holder]:
                del self._mapped[key]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
