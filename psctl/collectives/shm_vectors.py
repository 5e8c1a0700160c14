"""Vectors that the processes of one host sum where they lie: in segments, several to one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psctl.errors import ProtocolError
from psctl.transport.shared_memory import Segment, SegmentClient
from psctl.types import Member

SEGMENT = 32 << 20
"""Bytes of a segment that several vectors share; a longer one has its own. Pages that nobody touches cost nothing."""

LINE = 64
"""Vectors begin at a processor's cache line, so that none shares one with another's."""


class SharedVectors:
    """The memory that a process shares with others of its host.

    Args:
        segments: makes it.
        members: the others of its host, by rank.
    """

    def __init__(self, segments: SegmentClient, members: Mapping[int, Member]) -> None:
        self._segments, self._members = segments, members
        self._ours: list[tuple[int, Segment, torch.Tensor]] = []  # its address, itself, its bytes
        self._free = 0  # from here on, of the newest
        self._spare: dict[int, list[torch.Tensor]] = {}  # by size: bytes that were given back
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector of zeros that others can read; one of our own where the host has no such memory."""
        size = length * dtype.itemsize
        if not size or not self._members:
            return torch.zeros(length, dtype=dtype)
        if spare := self._spare.get(size):
            return spare.pop().view(dtype).zero_()
        if not self._ours or self._free + size > self._ours[-1][1].size:
            segment = self._segments.make(max(size, SEGMENT))
            if segment is None:
                return torch.zeros(length, dtype=dtype)
            data = torch.frombuffer(segment.memory, dtype=torch.uint8)
            self._ours.append((data.data_ptr(), segment, data))
            self._free = 0
        start = self._free
        self._free += -(-size // LINE) * LINE
        return self._ours[-1][2][start : start + size].view(dtype)

    def release(self, buffer: torch.Tensor) -> None:
        """Take a buffer back: the next one of its size lies there."""
        if self.where(buffer) is not None:
            self._spare.setdefault(buffer.nbytes, []).append(buffer.view(torch.uint8))

    def where(self, piece: torch.Tensor) -> tuple[int, int] | None:
        """Return in which segment of ours a piece lies, and from which byte on; None when it lies elsewhere."""
        at = piece.data_ptr()
        for start, segment, _ in self._ours:
            if start <= at < start + segment.size:
                return segment.number, at - start
        return None

    def read(self, peer: int, number: int, offset: int, size: int) -> torch.Tensor:
        """Return bytes of another's segment, not to be written.

        Raises:
            ProtocolError: it has no such segment on this host, or a smaller one.
        """
        found = self._theirs.get((peer, number))
        if found is None:
            segment = self._segments.get(self._members[peer], number)
            if segment is None:
                raise ProtocolError(f"worker/{peer}: holds no segment {number} on this host", where=f"worker/{peer}")
            found = self._theirs[peer, number] = torch.frombuffer(segment.memory, dtype=torch.uint8)
        if not 0 <= offset <= offset + size <= found.numel():
            raise ProtocolError(f"worker/{peer}: named bytes beyond its segment {number}", where=f"worker/{peer}")
        return found[offset : offset + size]
