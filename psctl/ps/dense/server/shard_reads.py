"""Reads of a shard by the job's readers (`groups:`), until they are answered.

A reader takes no part in clocks: no worker waits for it, and nothing waits for a read. It names the version that it
wants of all shards, so that the values which it gets from several servers are those of one step; a shard that is past
that version answers with its newest one, and the reader tries a later version (client/parameter_reads.py). Values are
copied for it: it may take them as slowly as it likes, while the shard steps in its own buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from psctl.ps.dense.shard_state import ShardState
from psctl.ps.messages import ReadShards, ShardRead
from psctl.ps.outputs import ToReader


class ShardReads:
    """The reads of one shard.

    Args:
        state: the shard's state.
        clocks: returns the number of all workers' clocks that are in it.
    """

    def __init__(self, state: ShardState, clocks: Callable[[], int]) -> None:
        self._state, self._clocks = state, clocks
        self._wanted: dict[int, tuple[int, int]] = {}  # by reader: ticket and version

    def on_read(self, reader: int, message: ReadShards) -> None:
        """Record a reader's request; it replaces an earlier one."""
        self._wanted[reader] = message.ticket, message.version

    def on_disconnected(self, reader: int) -> None:
        """Forget a reader's request: it asks again on its next connection."""
        self._wanted.pop(reader, None)

    def clear(self) -> None:
        """Forget all requests: another server answers them."""
        self._wanted.clear()

    def answers(self) -> list[ToReader]:
        """Answer the requests that the present version satisfies; the version must be on all of the chain."""
        state = self._state
        due = [reader for reader, (_, version) in self._wanted.items() if version <= (state.version or 0)]
        if not due or state.version is None:
            return []
        index, version, clocks = state.shard.index, state.version, self._clocks()
        copy = memoryview(bytes(state.bytes_of(state.values)))
        return [
            ToReader(reader, ShardRead(self._wanted.pop(reader)[0], index, version, clocks), copy)
            for reader in sorted(due)
        ]
