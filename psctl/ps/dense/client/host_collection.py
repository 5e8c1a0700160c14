"""Which pushes of workers of one host go together: one push a host; words between the workers in, what to do out.

Theory. Several workers of one host (a *group*) push the same shard to a server of another host. One of them, the
shard's *collector*, sums what the others hand in (where it lies, net/segments) and pushes that sum for all of them: it
*covers* them. What servers make of it is as if each had pushed for himself, so nothing here need be agreed upon: who
gives up pushes for himself, and a sum that came beside it is dropped (push_staging.py). What must hold is that
nobody waits for a word that does not come. Of a shard's push of a clock

    a member       hands it in, where its line to the collector is up, or says that it goes apart
    the collector  takes it along, or answers that it goes apart; once it has everyone's and its own it sums, and pushes

so the collector waits for a member only while that member's line is up, and a member for the collector only while its
line is up; whose line breaks pushes all that is outstanding for himself. A line that comes up brings first what the
member has already pushed for himself, or will not push, for it began after it. All that must be said again is said
apart, by each for himself.

The states of a push at its collector, once it has its own:

    GATHERING  --all are there-->  SUMMING  --the sum is made-->  SENT  --Taken-->  (over)
        '------------- a word that somebody goes apart, a broken line, a new Leads ------------> (over: all go apart)

The sum stands in a buffer of its own as long as a send buffer does: until the clock that takes its turn
(send_buffers.py).
Under bsp a worker is at most one clock ahead of what its collector has pushed; only there pushes go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec
import torch

from psctl.ps.dense.host_sums import RankGradients
from psctl.ps.messages import BetweenPeers, HostPush, PushAlone, SharedRange


class ToPeer(msgspec.Struct, frozen=True):
    """An instruction: send this to the worker `rank` of this host."""

    rank: int
    message: BetweenPeers


class HostSumTask(msgspec.Struct, frozen=True):
    """An instruction: sum these (host_sums.py), on a thread that may take its time, then say so (`summed`)."""

    shard: int
    clock: int
    parts: tuple[RankGradients, ...]
    into: torch.Tensor


class SeparatePush(msgspec.Struct, frozen=True):
    """An instruction: push this worker's own gradients."""

    shard: int
    clock: int


Act = ToPeer | HostSumTask | SeparatePush


class CollectionState(Enum):
    """Of a push that is the collector's; see the module's docstring."""

    GATHERING = 1
    SUMMING = 2
    SENT = 3


class HostCollection:
    """One worker's part in it. Calls must not overlap.

    Args:
        rank: this worker's.
        group: the ranks of its host, two or more, this one among them.
        shards: their number.
        base: the first clock.
        room: returns where the sum of a clock and shard is made.
    """

    def __init__(
        self, rank: int, group: Sequence[int], shards: int, base: int, room: Callable[[int, int], torch.Tensor]
    ) -> None:  # fmt: skip
        self._rank, self._group, self._sum_buffer = rank, tuple(group), room
        self._up: set[int] = set()  # of the group, to whom a line is up
        self._pushed = [base - 1] * shards  # the last clock that this worker has pushed, or handed in
        self._separate_until = [base - 1] * shards  # clocks up to this one go apart
        self._gradients: dict[tuple[int, int], dict[int, RankGradients]] = {}  # (shard, clock): what is to be summed
        self._state: dict[tuple[int, int], CollectionState] = {}  # of those that this worker has pushed
        self._lent_out: set[tuple[int, int]] = set()  # what its collector is to take along

    def collector(self, shard: int) -> int:
        """Return who pushes a shard for all."""
        return self._group[shard % len(self._group)]

    @property
    def _complete(self) -> bool:
        return len(self._up) == len(self._group) - 1

    # ---- this worker's own pushes ---------------------------------------------------------------------------------

    def add_own(self, shard: int, clock: int, part: RankGradients, at: SharedRange | None) -> list[Act]:
        """Take in that this worker's gradients stand there.

        Args:
            at: where others of this host read them; None: they cannot, or need not, for their server does itself.
        """
        self._pushed[shard] = clock
        collector, key = self.collector(shard), (shard, clock)
        if collector != self._rank:
            if collector not in self._up:
                return [SeparatePush(shard, clock)]
            if at is None:
                return [ToPeer(collector, PushAlone(shard, clock)), SeparatePush(shard, clock)]
            self._lent_out.add(key)
            return [ToPeer(collector, HostPush(shard, clock, part.weight, part.present, at))]
        if at is None or not self._complete or clock <= self._separate_until[shard]:
            return [*self._break_up(key), SeparatePush(shard, clock)]
        self._state[key] = CollectionState.GATHERING
        self._gradients.setdefault(key, {})[self._rank] = part
        return self._sum_if_complete(key)

    def _sum_if_complete(self, key: tuple[int, int]) -> list[Act]:
        parts = self._gradients[key]
        if self._state.get(key) is not CollectionState.GATHERING or len(parts) < len(self._group):
            return []
        self._state[key] = CollectionState.SUMMING
        shard, clock = key
        return [HostSumTask(shard, clock, tuple(parts[rank] for rank in self._group), self._sum_buffer(clock, shard))]

    def on_host_sum(self, shard: int, clock: int) -> bool:
        """Take in that a Gather is done; tell whether its sum is to be pushed."""
        if self._state.get((shard, clock)) is not CollectionState.SUMMING:
            return False
        self._state[shard, clock] = CollectionState.SENT
        return True

    def on_push_staged(self, shard: int, clock: int) -> None:
        """Take in that this worker's pushes of a shard up to `clock` are whole at its server."""
        for key in [key for key in self._state if key[0] == shard and key[1] <= clock]:
            del self._state[key], self._gradients[key]
        self._lent_out.difference_update([key for key in self._lent_out if key[0] == shard and key[1] <= clock])

    # ---- what others of the host say ------------------------------------------------------------------------------

    def on_host_push(self, shard: int, clock: int, part: RankGradients) -> list[Act]:
        """Take in what a member hands in."""
        key = shard, clock
        if clock <= self._pushed[shard] and self._state.get(key) is not CollectionState.GATHERING:
            return [ToPeer(part.rank, PushAlone(shard, clock))]  # ours has left
        if not self._complete or clock <= self._separate_until[shard]:
            return [ToPeer(part.rank, PushAlone(shard, clock)), *self._separate(key)]
        self._gradients.setdefault(key, {})[part.rank] = part
        return self._sum_if_complete(key)

    def on_push_alone(self, rank: int, shard: int, clock: int) -> list[Act]:
        """Take in that a member pushes for itself, or is to."""
        if self.collector(shard) == self._rank:
            self._gradients.get((shard, clock), {}).pop(rank, None)
            return self._separate((shard, clock))
        if rank != self.collector(shard) or (shard, clock) not in self._lent_out:
            return []
        self._lent_out.remove((shard, clock))
        return [SeparatePush(shard, clock)]

    def on_peer_connected(self, rank: int, outstanding: Iterable[tuple[int, int]]) -> list[Act]:
        """Take in that there is a line to a worker of the group.

        Args:
            outstanding: by shard and clock, what this worker has pushed and is not Pushed.
        """
        self._up.add(rank)
        gone = {*outstanding, *enumerate(self._pushed)}  # who begins in mid-run pushes nothing before that
        return [ToPeer(rank, PushAlone(*key)) for key in sorted(gone) if self.collector(key[0]) == rank]

    def on_peer_disconnected(self, rank: int) -> list[Act]:
        """Take in that the line to a worker of the group is broken: nobody waits for it."""
        self._up.discard(rank)
        acts: list[Act] = []
        for key in sorted(key for key in self._lent_out if self.collector(key[0]) == rank):
            self._lent_out.remove(key)
            acts.append(SeparatePush(*key))
        for shard in range(len(self._pushed)):
            if self.collector(shard) == self._rank:  # whoever takes its place may have pushed the next clock already
                for clock in (self._pushed[shard], self._pushed[shard] + 1):
                    acts += self._separate((shard, clock))
        return acts

    def _separate(self, key: tuple[int, int]) -> list[Act]:
        """Nobody waits for anybody with this push any more, if it has not left."""
        shard, clock = key
        state = self._state.get(key)
        if state is CollectionState.SENT or (state is None and clock <= self._pushed[shard]):
            return []
        self._separate_until[shard] = max(self._separate_until[shard], clock)
        return [*self._break_up(key), *([SeparatePush(shard, clock)] if state is not None else [])]

    # ---- servers --------------------------------------------------------------------------------------------------

    def break_up_shard(self, shard: int) -> list[ToPeer]:
        """Take in that a shard's server wants all that is outstanding, or is lost: everyone goes apart.

        This worker's own pushes are not among what is returned: whoever calls knows when they can leave.
        """
        tells: list[ToPeer] = []
        for key in sorted(key for key in self._lent_out if key[0] == shard):
            self._lent_out.remove(key)
            tells.append(ToPeer(self.collector(shard), PushAlone(*key)))
        for key in sorted(key for key in self._state if key[0] == shard):
            tells += self._break_up(key)
        return tells

    def _break_up(self, key: tuple[int, int]) -> list[ToPeer]:
        """Let those who have handed in a push go apart."""
        self._state.pop(key, None)
        members = self._gradients.pop(key, {})
        return [ToPeer(rank, PushAlone(*key)) for rank in self._group if rank in members and rank in self._up]
