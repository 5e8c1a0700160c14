"""Buffers in shared memory, and those of others of this host that are read there (ps/dense/lent_buffers.py has the
theory).

A worker and a server find out that they are on one host when they meet: the worker names a segment of its own (Near),
and a server that its agent gives that segment says so (IsNear). Until then, and to all others, bytes are sent. Nobody
is near any longer when the connection is over; on the next one they meet anew.

Buffers are cut from segments one behind the other and are not given back, for somebody may be reading what lies in
one; those who need them have pools of their own (ps/dense/shard_state.py). Segments become larger as more are
needed; their pages take no memory before they are touched.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.lent_buffers import Lending
from psctl.ps.messages import IsNear, Near, Place, Push, Values
from psctl.ps.table_messages import Fetched, Update
from psctl.transport.shared_memory import Segment, SegmentClient
from psctl.types import Member

PAGE = 4096

FIRST = 64 << 20
"""Bytes of a process's first segment at least; each further one is at least twice as large."""


class SharedBuffers(Lending):
    """One process's end; may be called by any thread.

    Args:
        segments: makes and finds segments.
    """

    def __init__(self, segments: SegmentClient) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        self._own: list[tuple[int, Segment]] = []  # with the address of its first byte
        self._filled = 0  # bytes of the last one
        self._near: dict[int, Member] = {}  # who reads ours, and we theirs
        self._theirs: dict[tuple[Member, int], Segment] = {}

    # ---- ours ------------------------------------------------------------------------------------------------------

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        with self._lock:
            part = self._cut(size) if size else None
        if part is None:
            return super().zeros(count, dtype)
        return torch.frombuffer(part, dtype=dtype)

    def room(self, size: int) -> memoryview | None:
        """Return new shared bytes; None: there are none."""
        with self._lock:
            return self._cut(size)

    def _cut(self, size: int) -> memoryview | None:
        room = -(-size // PAGE) * PAGE
        if not self._own or self._filled + room > self._own[-1][1].size:
            wanted = max(room, 2 * self._own[-1][1].size if self._own else FIRST)
            segment = self._segments.make(wanted) or self._segments.make(room)
            if segment is None:
                return None
            self._own.append((torch.frombuffer(segment.memory, dtype=torch.uint8).data_ptr(), segment))
            self._filled = 0
        part = self._own[-1][1].part(self._filled, size)
        self._filled += room
        return part

    def place(self, rank: int, tensor: torch.Tensor) -> Place | None:
        return self.where(tensor) if rank in self._near else None

    def where(self, tensor: torch.Tensor) -> Place | None:
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for base, segment in self._own:
            if base <= start and start + size <= base + segment.size:
                return Place(segment.number, start - base, size)
        return None

    # ---- meeting ---------------------------------------------------------------------------------------------------

    def greet(self, peer: Any) -> None:
        """Say to a server that we just met what it must have to be near; nothing when there is no shared memory."""
        with self._lock:
            number = self._own[0][1].number if self._own else None
        if number is not None:
            peer.send(Near(number))

    def parted(self, member: Member) -> None:
        """Nobody at the other end any more: let go of what it lent, once nobody here reads it."""
        if self._near.get(member.rank) == member:
            del self._near[member.rank]
        with self._lock:
            for holder, number in [key for key in self._theirs if key[0] == member]:
                del self._theirs[holder, number]

    # ---- theirs ----------------------------------------------------------------------------------------------------

    def heard(self, peer: Any, message: Any) -> memoryview | None:
        """Take in who is near; return the bytes that the message lends, None when it lends none.

        Raises:
            ProtocolError: there are no such bytes.
        """
        member: Member = peer.member
        match message:
            case Near(segment=number):
                if member.role == "worker" and self._found(member, number) is not None:
                    peer.send(IsNear())
                    self._near[member.rank] = member
            case IsNear():
                self._near[member.rank] = member
            case Push(at=Place() as at) | Values(at=Place() as at) | Update(at=at) | Fetched(at=at) if at is not None:
                found = self.read(member, at) if self._near.get(member.rank) == member else None
                if found is None:
                    what = f"{member}: lends memory {at.segment}, which is not on this host"
                    raise ProtocolError(what, where=str(member))
                return found
        return None

    def read(self, member: Member, at: Place) -> memoryview | None:
        """Return bytes that another process lends; None when it is not on this host.

        Raises:
            ProtocolError: its segment has no such bytes.
        """
        segment = self._found(member, at.segment)
        return segment.part(at.offset, at.size) if segment is not None else None

    def _found(self, member: Member, number: int) -> Segment | None:
        with self._lock:
            found = self._theirs.get((member, number)) or self._segments.get(member, number)
            if found is not None:
                self._theirs[member, number] = found
            return found


def alone(me: Member) -> SharedBuffers:
    """Return the end of a process that shares nothing: all bytes are sent."""
    return SharedBuffers(SegmentClient(me, None))
