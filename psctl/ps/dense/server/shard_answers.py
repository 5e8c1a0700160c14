"""What workers ask of one shard, values and norms, and which versions of it they may still be reading."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from psctl.ps.dense.lent_buffers import Lending
from psctl.ps.dense.server.aggregation import squares
from psctl.ps.dense.server.push_staging import PushStaging
from psctl.ps.dense.shard_state import ShardState
from psctl.ps.messages import LARGE, NormsAnswer, Pull, Values, ValuesPart
from psctl.ps.outputs import ToWorker


class _WaitingPull(msgspec.Struct, frozen=True):
    """A pull that waits."""

    clock: int
    oldest: int
    have: int


class VersionReaders:
    """Which version of the shard each worker holds whole, and the newest that went out to it."""

    def __init__(self) -> None:
        self._landed: dict[int, int] = {}
        self._sent: dict[int, int] = {}

    def may_read(self, version: int) -> bool:
        """Tell whether bytes of a version may still be on their way to a worker, or lent to it."""
        return any(self._landed.get(rank, -1) < version <= sent for rank, sent in self._sent.items())

    def on_sent(self, rank: int, version: int) -> None:
        """Take in that a version goes out to a worker."""
        self._sent[rank] = version

    def on_received(self, rank: int, version: int) -> None:
        """Take in that a worker said what it holds."""
        self._landed[rank] = max(self._landed.get(rank, -1), version)

    def on_covered(self, ranks: Collection[int], version: int) -> None:
        """Take in what another worker says these hold. It may speak of an older start of one: it counts for who has
        said on its own connection that it holds some version, and so has nothing older on its way."""
        for rank in ranks:
            if rank in self._landed:
                self.on_received(rank, version)

    def on_disconnected(self, rank: int) -> None:
        """Forget what a worker said over a connection, but not what it, or a successor, may read on."""
        self._landed.pop(rank, None)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Others read no more."""
        for rank in self._sent.keys() - ranks:
            del self._sent[rank]


class ShardAnswers:
    """Pulls and questions for norms, until they are answered.

    Args:
        state: the shard's.
        intake: what makes its next version.
        readers: told of what goes out.
        lending: which workers read values where they lie.
    """

    def __init__(self, state: ShardState, intake: PushStaging, readers: VersionReaders, lending: Lending) -> None:
        self._state, self._intake, self._readers, self._lending = state, intake, readers, lending
        self._pulls: dict[int, _WaitingPull] = {}
        self._norms: dict[int, int] = {}  # rank -> clock
        self._squares: list[float | None] | None = None  # of the clock under way

    def on_pull(self, rank: int, message: Pull) -> None:
        """Remember that a rank waits for values."""
        have = dict(zip(message.shards, message.have, strict=True))[self._state.shard.index]
        self._pulls[rank] = _WaitingPull(message.clock, message.oldest, have)
        if self._state.terms.hosts and have >= 0:
            self._readers.on_received(rank, have)  # its pushes may go with another's, and say nothing of it

    def on_push(self, rank: int, clock: int) -> None:
        """Remember that a rank waits for the sum of a clock that it pushes."""
        self._pulls[rank] = _WaitingPull(clock + 1, clock + 1, -1)

    def on_norms_query(self, rank: int, clock: int) -> None:
        """Remember that a rank waits for the norms of a clock."""
        self._norms[rank] = clock

    def on_disconnected(self, rank: int) -> None:
        """A rank's connection is gone: it asks again."""
        self._pulls.pop(rank, None)
        self._norms.pop(rank, None)

    def clear(self) -> None:
        """Forget who waits: another server answers."""
        self._pulls.clear()
        self._norms.clear()

    def on_new_clock(self) -> None:
        """The clock under way is another, or begins again."""
        self._squares = None

    @property
    def wanted_clocks(self) -> list[int]:
        """How many of everyone's clocks are waited for."""
        return [wish.oldest for wish in self._pulls.values()]

    def values(self) -> list[ToWorker]:
        """Answer the pulls that the present version satisfies; it is on all of the chain."""
        outputs: list[ToWorker] = []
        for rank in sorted(self._pulls):
            wish = self._pulls[rank]
            if self._satisfies(rank, wish):
                del self._pulls[rank]
                outputs += self._values_to(rank, wish.clock)
        return outputs

    def _satisfies(self, rank: int, wish: _WaitingPull) -> bool:
        version = self._state.version
        assert version is not None, "it is settled"
        if self._state.terms.staleness is None:
            return self._intake.applied_of(rank) >= wish.clock - 1 and self._intake.clocks >= wish.oldest
        return version >= wish.oldest and version > wish.have

    def _values_to(self, rank: int, clock: int) -> list[ToWorker]:
        state, index = self._state, self._state.shard.index
        version = state.version
        assert version is not None, "it is settled"
        self._readers.on_sent(rank, version)
        at = self._lending.place_for(rank, state.values)
        head = Values(index, version, state.present, clock, self._intake.clocks, at)
        if at is not None:
            return [ToWorker(rank, head)]
        view = state.bytes_of(state.values_to_send())
        outputs = [ToWorker(rank, head, view[:LARGE] or None)]
        for offset in range(LARGE, len(view), LARGE):
            outputs.append(ToWorker(rank, ValuesPart(index, version, offset), view[offset : offset + LARGE]))
        return outputs

    def norms(self) -> list[ToWorker]:
        """Answer who waits for the norms of the clock under way, when all pushes are in."""
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
