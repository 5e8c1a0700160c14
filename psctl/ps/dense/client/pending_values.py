"""What a wait for values still misses, and when enough of it has landed that the user's thread copies it meanwhile.

The copies at the end of a wait are what no link does anything beside: 10 to 60 ms of the 2.8 s that 100 MB took on
four equal hosts. So whoever waits for much is woken when a part of it has landed, copies that, and waits for the rest.
Each time it is a part of what is left: few wake-ups, and little is left to copy at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.ps.dense.client.dense_client_state import DenseClient

PART = 4
"""What has landed is copied when it is this part of what was missing the last time,"""
LEAST = 4 << 20
"""and so many bytes at least."""


class PendingValues:
    """The shards whose values a wait still misses; all calls but `landed` under what guards the mind.

    Args:
        mind: knows what has landed.
        clock: whose values are waited for.
        shards: which are.
        exact: as ClientMind.missing has it.
    """

    def __init__(self, mind: DenseClient, clock: int, shards: Sequence[int], *, exact: bool) -> None:
        self._mind, self._clock, self._exact = mind, clock, exact
        self._sizes, self._before = mind.sizes, list(shards)
        self.left = mind.missing_shards(clock, shards, exact)
        self._enough = 0  # bytes that may be left when it is time to copy

    def newly_arrived(self) -> list[int]:
        """Return those that have landed since the last call, and at first those that had before."""
        landed, self._before = sorted(set(self._before).difference(self.left)), self.left
        total = self._bytes()
        self._enough = total - max(LEAST, total // PART) if total >= 2 * LEAST else 0
        return landed

    def servers_waited_for(self) -> set[int]:
        """Return whom the wait is for; nobody when it is time to copy what has landed."""
        self.left = self._mind.missing_shards(self._clock, self.left, self._exact)
        if self._enough and self._bytes() <= self._enough:
            return set()
        return {self._mind.owners[shard] for shard in self.left} if self.left else set()

    def _bytes(self) -> int:
        return sum(map(self._sizes.__getitem__, self.left))
