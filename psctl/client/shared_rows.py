"""Rooms in shared memory for the rows of a process's messages about tables, and the word of what was read of them.

Theory, as for the dense store (ps/dense/lent_buffers.py): what is lent is not sent; its message says where it lies,
and the
reader works from there. A room is free again when nothing here refers to it any more (its last view is gone), and a
message that was lent is referred to for as long as somebody may read it:

- an update, by the change itself, until all shards have said Done;
- an answer, by the desk, until the worker has said that it read it (Back, before what it says next), has come anew on
  another connection, which it does only when nothing reads for the old one any more, or is dead.

Rooms have a power of two of bytes, and the one that was used last is used next, so that its pages are there. Where no
room is left, or none is shared, memory is taken as always, and what lies there is sent.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from psctl.client.shared_buffers import SharedBuffers
from psctl.ps.tables.reductions import Array
from psctl.transport.shared_memory import SegmentClient

SMALLEST = 1 << 16
"""Bytes of the smallest room: less is sent."""

MOST = 1 << 28
"""Bytes of rooms that a process has at most; pages that were never used take no memory."""


class SharedRows:
    """One process's end; may be called by any thread.

    Args:
        segments: makes and finds segments.
    """

    def __init__(self, segments: SegmentClient) -> None:
        self.sharing = SharedBuffers(segments)
        self._left = MOST if self.sharing.room(1) is not None else 0
        self._free: dict[int, list[memoryview]] = {}

    def room(self, size: int) -> Array:
        """Return new memory of so many bytes, whose content is anything."""
        part = self._part(1 << (size - 1).bit_length()) if size >= SMALLEST and self._left else None
        if part is None:
            return np.empty(size, dtype=np.uint8)
        whole = np.frombuffer(part[:size], dtype=np.uint8)
        weakref.finalize(whole, self._free[len(part)].append, part).atexit = False
        return whole

    def _part(self, size: int) -> memoryview | None:
        free = self._free.setdefault(size, [])
        try:
            return free.pop()  # others may be here too
        except IndexError:
            if size > self._left:
                return None
            self._left -= size
            return self.sharing.room(size)

    def lent(self, rank: int, message: Any, payload: memoryview | None) -> Any:
        """Return the message that lends the payload to the other side's process `rank`; None: it must be sent."""
        if payload is None or len(payload) < SMALLEST or not self._left:
            return None
        at = self.sharing.place(rank, torch.frombuffer(payload, dtype=torch.uint8))
        return None if at is None else replace(message, at=at)
