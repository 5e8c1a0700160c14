"""The values that a wait of a worker is still missing, and when to copy those that have arrived."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.ps.dense.client.dense_client_state import DenseClient

PART = 4
"""Arrived values are copied when they are at least this fraction of what was missing the last time,"""
LEAST = 4 << 20
"""and at least this many bytes."""


class PendingValues:
    """The shards whose values a wait is still missing. Calls must not overlap with those of the client.

    Copies at the end of a wait overlap with no transfer: 10 to 60 ms of the 2.8 s that 100 MB took on four equal hosts.
    So a wait for many bytes also ends when a part of them has arrived; the user's thread copies that part and waits for
    the rest. The part is a fraction of what is left: few wake-ups, and little is left to copy at the end.

    Args:
        client: the worker's client.
        clock: the clock whose values are waited for.
        shards: their shards.
        exact: as in DenseClient.missing_shards.
    """

    def __init__(self, client: DenseClient, clock: int, shards: Sequence[int], *, exact: bool) -> None:
        self._client, self._clock, self._exact = client, clock, exact
        self._sizes, self._before = client.sizes, list(shards)
        self.left = client.missing_shards(clock, shards, exact)
        self._enough = 0  # bytes that may be missing when arrived values are copied

    def newly_arrived(self) -> list[int]:
        """Return the shards that have arrived since the last call; the first call includes those that had before."""
        landed, self._before = sorted(set(self._before).difference(self.left)), self.left
        total = self._bytes()
        self._enough = total - max(LEAST, total // PART) if total >= 2 * LEAST else 0
        return landed

    def servers_waited_for(self) -> set[int]:
        """Return the servers that the wait is for; none when it is time to copy what has arrived."""
        self.left = self._client.missing_shards(self._clock, self.left, self._exact)
        if self._enough and self._bytes() <= self._enough:
            return set()
        return {self._client.owners[shard] for shard in self.left} if self.left else set()

    def _bytes(self) -> int:
        return sum(map(self._sizes.__getitem__, self.left))
