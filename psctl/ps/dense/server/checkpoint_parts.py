"""A server's part of a checkpoint, gathered from the snapshots of its shards."""

from __future__ import annotations

from collections.abc import Iterable

from psctl.ps.outputs import SaveSlices, Snapshot
from psctl.ps.snapshot import CopiedSlice


class CheckpointParts:
    """Collects snapshots of shards until all parts of a step are present.

    Args:
        base: the first version of the job.
    """

    def __init__(self, base: int) -> None:
        self._parts: dict[int, dict[int, list[CopiedSlice]]] = {}  # step -> shard -> slices
        self._empty = base - 1  # newest step whose empty part was returned (no shard was led here)

    def add(self, snapshot: Snapshot, shards: Iterable[int]) -> list[SaveSlices]:
        """Add a shard's snapshot; return the server's part once every shard in `shards` has one."""
        parts = self._parts.setdefault(snapshot.step, {})
        parts[snapshot.shard] = snapshot.copied
        if not all(index in parts for index in shards):
            return []
        del self._parts[snapshot.step]
        return [SaveSlices(snapshot.step, [one for index in sorted(parts) for one in parts[index]])]

    def empty_part(self, step: int) -> list[SaveSlices]:
        """Return the empty part of a server that leads no shard, at most once a step."""
        if step <= self._empty:
            return []
        self._empty = step
        return [SaveSlices(step, [])]
