"""A shard's answers to its workers, values and norms, and the versions that workers may still be reading."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.dense.server.aggregation import squares
from psctl.ps.dense.server.push_staging import PushStaging
from psctl.ps.dense.shard_state import ShardState
from psctl.ps.messages import NormsAnswer, Pull, Values
from psctl.ps.outputs import ToWorker


class _WaitingPull(msgspec.Struct, frozen=True):
    """A pull that is not answered yet."""

    clock: int
    oldest: int
    have: int


class VersionReaders:
    """For each worker, the version that it holds completely, and the newest version that was sent to it."""

    def __init__(self) -> None:
        self._landed: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._disconnected: set[int] = set()

    def may_read(self, version: int) -> bool:
        """Return whether a worker may still be receiving bytes of a version, or reading them in shared memory."""
        return any(self._landed.get(rank, -1) < version <= sent for rank, sent in self._sent.items())

    def on_sent(self, rank: int, version: int) -> None:
        """Record that a version is sent to a worker."""
        self._sent[rank] = version
        self._disconnected.discard(rank)

    def on_received(self, rank: int, version: int) -> None:
        """Record the version that a worker reports to hold."""
        self._landed[rank] = max(self._landed.get(rank, -1), version)

    def on_covered(self, ranks: Collection[int], version: int) -> None:
        """Record the version that another worker reports for these. The report may be about an earlier process of a
        rank: it counts only for ranks that reported some version on their own connection, so that nothing older is
        in transmission to them."""
        for rank in ranks:
            if rank in self._landed:
                self.on_received(rank, version)

    def on_disconnected(self, rank: int) -> None:
        """Forget a worker's reports over a connection, but not what it, or its replacement, may still read."""
        self._landed.pop(rank, None)
        self._disconnected.add(rank)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Keep these ranks as readers, and others that are connected: a worker that leaves reads its last values."""
        for rank in self._sent.keys() & self._disconnected - set(ranks):
            del self._sent[rank]


class ShardAnswers:
    """Pulls and norm queries, until they are answered.

    Args:
        state: the shard's state.
        intake: the aggregation that makes its next version.
        readers: records the versions that are sent.
        allocator: finds the place at which workers read values.
    """

    def __init__(
        self, state: ShardState, intake: PushStaging, readers: VersionReaders, allocator: BufferAllocator
    ) -> None:
        self._state, self._intake, self._readers, self._allocator = state, intake, readers, allocator
        self._pulls: dict[int, _WaitingPull] = {}
        self._norms: dict[int, int] = {}  # rank -> clock
        self._squares: list[float | None] | None = None  # of the clock under way

    def on_pull(self, rank: int, message: Pull) -> None:
        """Record that a rank waits for values."""
        have = dict(zip(message.shards, message.have, strict=True))[self._state.shard.index]
        self._pulls[rank] = _WaitingPull(message.clock, message.oldest, have)
        if self._state.terms.hosts and have >= 0:
            self._readers.on_received(rank, have)  # its pushes may be in another worker's host sum, without its version

    def on_push(self, rank: int, clock: int) -> None:
        """Record that a rank waits for the sum of a clock that it pushes."""
        self._pulls[rank] = _WaitingPull(clock + 1, clock + 1, -1)

    def on_norms_query(self, rank: int, clock: int) -> None:
        """Record that a rank waits for the norms of a clock."""
        self._norms[rank] = clock

    def on_disconnected(self, rank: int) -> None:
        """Forget a rank's requests: it repeats them on its next connection."""
        self._pulls.pop(rank, None)
        self._norms.pop(rank, None)

    def clear(self) -> None:
        """Forget all requests: another server answers them."""
        self._pulls.clear()
        self._norms.clear()

    def on_new_clock(self) -> None:
        """Drop the norms: the clock under way is another, or starts again."""
        self._squares = None

    @property
    def wanted_clocks(self) -> list[int]:
        """The numbers of all workers' clocks that pulls wait for."""
        return [wish.oldest for wish in self._pulls.values()]

    def values(self) -> list[ToWorker]:
        """Answer the pulls that the present version satisfies; the version must be on all of the chain."""
        outputs: list[ToWorker] = []
        for rank in sorted(self._pulls):
            wish = self._pulls[rank]
            if self._satisfies(rank, wish):
                del self._pulls[rank]
                outputs.append(self._values_to(rank, wish.clock))
        return outputs

    def _satisfies(self, rank: int, wish: _WaitingPull) -> bool:
        version = self._state.version
        assert version is not None, "it is settled"
        if self._state.terms.staleness is None:
            return self._intake.applied_of(rank) >= wish.clock - 1 and self._intake.clocks >= wish.oldest
        return version >= wish.oldest and version > wish.have

    def _values_to(self, rank: int, clock: int) -> ToWorker:
        state, index = self._state, self._state.shard.index
        version = state.version
        assert version is not None, "it is settled"
        self._readers.on_sent(rank, version)
        at = self._allocator.place_for(rank, state.values)
        head = Values(index, version, state.present, clock, self._intake.clocks, at)
        return ToWorker(rank, head, state.bytes_of(state.values_to_send()) if at is None else None)

    def norms(self) -> list[ToWorker]:
        """Answer the norm queries for the clock under way, once all pushes have arrived."""
        if not self._norms:
            return []
        version = self._state.version
        wanted = [rank for rank, clock in self._norms.items() if clock == version]
        found = self._intake.clock_mean() if wanted else None
        if found is None or version is None:
            return []
        if self._squares is None:
            self._squares = squares(self._state, *found)
        answer = NormsAnswer(self._state.shard.index, version, self._squares)
        for rank in wanted:
            del self._norms[rank]
        return [ToWorker(rank, answer) for rank in sorted(wanted)]
