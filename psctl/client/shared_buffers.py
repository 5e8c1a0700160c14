"""Gradients, values and rows in shared memory, which workers and servers of one host read without sending them.

`psctl/ps/dense/buffer_allocator.py` describes when a buffer that another process reads may be written again. A worker
and a server detect at their connection that they are on one host: the worker names one of its segments
(SharedMemoryOffer), and a server that gets that segment from its agent answers SharedMemoryAccepted. Until then, and
between hosts, bytes are sent. The sharing ends with the connection; the next connection starts it again.
"""

from __future__ import annotations

import weakref
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.errors import ProtocolError
from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.messages import Push, SharedMemoryAccepted, SharedMemoryOffer, SharedRange, Values
from psctl.ps.table_messages import Fetched, Update
from psctl.ps.tables.reductions import Array
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.shared_memory import SegmentClient, SharedAllocator
from psctl.types import Member

M = TypeVar("M", bound=msgspec.Struct)

SMALLEST = 1 << 16
"""Bytes of the smallest rows that are shared; shorter payloads are sent."""

MOST = 1 << 28
"""Most bytes of shared memory that one process allocates for rows."""


class SharedBuffers(BufferAllocator):
    """The shared buffers of one process, and access to those of others. May be called by any thread.

    Args:
        segments: makes and finds segments.
    """

    def __init__(self, segments: SegmentClient) -> None:
        self._allocator = SharedAllocator(segments)
        self._near: dict[int, Member] = {}  # processes that share memory with this one, by rank

    # ---- memory of this process --------------------------------------------------------------------------------------

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        part = self._allocator.allocate(count * dtype.itemsize) if count else None
        return torch.frombuffer(part, dtype=dtype) if part is not None else super().zeros(count, dtype)

    def place_for(self, rank: int, tensor: torch.Tensor) -> SharedRange | None:
        return self.place_on_host(tensor) if rank in self._near else None

    def place_on_host(self, tensor: torch.Tensor) -> SharedRange | None:
        size = tensor.numel() * tensor.element_size()
        found = self._allocator.locate(tensor.data_ptr(), size)
        return SharedRange(*found, size) if found is not None else None

    # ---- connections -------------------------------------------------------------------------------------------------

    def offer(self, peer: PeerConnection) -> None:
        """Name a segment to a newly connected server; nothing where this process has no shared memory."""
        number = self._allocator.first_segment
        if number is not None:
            peer.send(SharedMemoryOffer(number))

    def forget(self, member: Member) -> None:
        """End the sharing with a process after its connection has ended."""
        if self._near.get(member.rank) == member:
            del self._near[member.rank]
        self._allocator.unmap(member)

    # ---- memory of others --------------------------------------------------------------------------------------------

    def find_shared_bytes(self, peer: PeerConnection, message: object) -> memoryview | None:
        """Return the shared bytes that a message refers to, if any; record which processes share memory.

        Raises:
            ProtocolError: the sender shares no such bytes.
        """
        member = peer.member
        match message:
            case SharedMemoryOffer(segment=number):
                if member.role == "worker" and self._allocator.map(member, number) is not None:
                    peer.send(SharedMemoryAccepted())
                    self._near[member.rank] = member
            case SharedMemoryAccepted():
                self._near[member.rank] = member
            case Push(at=SharedRange() as at) | Values(at=SharedRange() as at) | Update(at=at) | Fetched(at=at) if (
                at is not None
            ):
                found = self.read(member, at) if self._near.get(member.rank) == member else None
                if found is None:
                    what = f"{member} refers to shared memory {at.segment}, which is not on this host"
                    raise ProtocolError(what, where=str(member))
                return found
        return None

    def read(self, member: Member, at: SharedRange) -> memoryview | None:
        """Return bytes of another process's shared memory; None when it is not on this host.

        Raises:
            ProtocolError: its segment has no such bytes.
        """
        return self._allocator.read(member, at.segment, at.offset, at.size)


class SharedRows(SharedBuffers):
    """Shared memory for the rows of table messages. May be called by any thread.

    A buffer is free when its last view is gone. A shared buffer is referenced for as long as it may be read: an update
    by its change, until all shards have answered Done; an answer by the server's connections, until the worker reports
    that it was read (AnswersRead), requests it again on another connection, or is lost. Sizes are powers of two.

    Args:
        segments: makes and finds segments.
    """

    def __init__(self, segments: SegmentClient) -> None:
        super().__init__(segments)
        self._left = MOST if self._allocator.allocate(1) is not None else 0

    def allocate(self, size: int) -> Array:
        """Return `size` bytes of undefined content; shared ones if they are not too few and available."""
        part = self._part(1 << (size - 1).bit_length()) if size >= SMALLEST and self._left else None
        if part is None:
            return np.empty(size, dtype=np.uint8)
        whole = np.frombuffer(part[:size], dtype=np.uint8)
        weakref.finalize(whole, self._allocator.release, part).atexit = False
        return whole

    def _part(self, size: int) -> memoryview | None:
        part = self._allocator.reuse(size)
        if part is None and size <= self._left:
            self._left -= size
            part = self._allocator.allocate(size)
        return part

    def share(self, rank: int, message: M, payload: memoryview | None) -> M | None:
        """Return the message with the payload's place for process `rank`; None: the payload must be sent."""
        if payload is None or len(payload) < SMALLEST or not self._left:
            return None
        at = self.place_for(rank, torch.frombuffer(payload, dtype=torch.uint8))
        return None if at is None else replace(message, at=at)


def private_buffers(me: Member) -> SharedBuffers:
    """Return the buffers of a process without shared memory: all bytes are sent."""
    return SharedBuffers(SegmentClient(me, None))
