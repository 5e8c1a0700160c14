"""One server's part of a checkpoint, gathered from its shards."""

from __future__ import annotations

from collections.abc import Iterable

from psctl.ps.outputs import SaveSlices, Snapshot
from psctl.ps.snapshot import CopiedSlice


class CheckpointParts:
    """Snapshots of shards until a step's are all here.

    Args:
        base: the first version of the job.
    """

    def __init__(self, base: int) -> None:
        self._parts: dict[int, dict[int, list[CopiedSlice]]] = {}  # step -> shard -> slices
        self._empty = base - 1  # newest that this server took part in without leading a shard

    def add(self, snapshot: Snapshot, owed: Iterable[int]) -> list[SaveSlices]:
        """Take in a shard's part; return the server's when all shards that owe one have given theirs."""
        parts = self._parts.setdefault(snapshot.step, {})
        parts[snapshot.shard] = snapshot.copied
        if not all(index in parts for index in owed):
            return []
        del self._parts[snapshot.step]
        return [SaveSlices(snapshot.step, [one for index in sorted(parts) for one in parts[index]])]

    def empty_part(self, step: int) -> list[SaveSlices]:
        """Return the (empty) part of a server that leads no shard; only once a step."""
        if step <= self._empty:
            return []
        self._empty = step
        return [SaveSlices(step, [])]
