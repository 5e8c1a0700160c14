"""Cuts buffers from this process's shared-memory segments, and maps the segments of other processes of the host."""

from __future__ import annotations

import ctypes
import threading

from psctl.transport.shared_memory import Segment, SegmentClient
from psctl.types import Member

PAGE = 4096

FIRST = 64 << 20
"""Bytes of the first segment at least; each further one is at least twice as large as the one before."""


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
