"""Collects the pushes of one host's workers, or of one rack's, into one push.

Theory. Several workers of one host or rack (a *group*) push the same shard to a server elsewhere. One of them, the
shard's *collector*, sums the gradients of the others where they are in shared memory, and pushes that sum for all of
them: it *covers* them. Its effect on servers is the same as if each worker had pushed separately, so no agreement is
necessary: a worker may push separately at any time, and a sum that duplicates such a push is dropped (push_staging.py).
What must hold is that no worker waits for a message that is never sent. For a shard's push of a clock

    a member       sends HostPush if its connection to the collector is up, or PushAlone
    the collector  includes it, or answers PushAlone; once it has all members' gradients and its own, it sums and pushes

so the collector waits for a member only while that member's connection is up, and a member for the collector only while
its connection is up; a worker whose connection breaks pushes everything outstanding separately. On a new connection a
member first sends PushAlone for the pushes that it has already made separately, or will not make because it started
later. Whatever must be sent again is pushed separately by each worker.

The states of a push at its collector, once it has its own gradients:

    GATHERING  --all present-->  SUMMING  --sum complete-->  SENT  --PushStaged-->  (removed)
        '------------- PushAlone, a broken connection, a new Leads ------------> (removed: all push separately)

The sum is kept in a buffer of its own as long as a send buffer: until a later clock reuses the buffer
(send_buffers.py).
Under bsp a worker is at most one clock ahead of its collector's pushes; only under bsp are pushes collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec
import torch

from psctl.ps.dense.host_sums import RankGradients
from psctl.ps.messages import BetweenPeers, HostPush, PushAlone, SharedRange


class ToPeer(msgspec.Struct, frozen=True):
    """An instruction: send a message, and its payload if there is one, to the worker `rank` of this group."""

    rank: int
    message: BetweenPeers
    payload: memoryview | None = None


Offer = SharedRange | memoryview
"""A worker's gradients for its collector: their place in shared memory, or the bytes to send."""


class HostSumTask(msgspec.Struct, frozen=True):
    """An instruction: sum these parts (host_sums.py) on another thread, then call `on_host_sum`."""

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
    """The state of a push at its collector; see the module's docstring."""

    GATHERING = 1
    SUMMING = 2
    SENT = 3


class HostCollection:
    """The state machine of one worker of a group. Calls must not overlap.

    Args:
        rank: this worker's rank.
        group: the ranks of its host or rack, two or more, this one included.
        shards: number of shards.
        base: the first clock.
        sum_buffer: returns the buffer for the host sum of a clock and shard.
    """

    def __init__(
        self, rank: int, group: Sequence[int], shards: int, base: int, sum_buffer: Callable[[int, int], torch.Tensor]
    ) -> None:  # fmt: skip
        self._rank, self._group, self._sum_buffer = rank, tuple(group), sum_buffer
        self._up: set[int] = set()  # ranks of the group with a connection to this worker
        self._pushed = [base - 1] * shards  # the last clock that this worker pushed, or offered
        self._separate_until = [base - 1] * shards  # clocks up to this one are pushed separately
        self._gradients: dict[tuple[int, int], dict[int, RankGradients]] = {}  # (shard, clock): parts of the sum
        self._state: dict[tuple[int, int], CollectionState] = {}  # of the pushes that this worker has made
        self._offered: set[tuple[int, int]] = set()  # pushes offered to their collector

    def collector(self, shard: int) -> int:
        """Return the rank that pushes a shard for the group."""
        return self._group[shard % len(self._group)]

    def is_up(self, rank: int) -> bool:
        """Return whether there is a connection to a rank of the group."""
        return rank in self._up

    @property
    def _complete(self) -> bool:
        return len(self._up) == len(self._group) - 1

    # ---- this worker's own pushes ---------------------------------------------------------------------------------

    def add_own(self, shard: int, clock: int, part: RankGradients, offer: Offer | None) -> list[Act]:
        """Add this worker's own gradients; return what to do.

        Args:
            shard: its index.
            clock: of the gradients.
            part: the gradients.
            offer: how others of this group get them; None: they cannot, or need not, because their server reads them
                or is in this rack.
        """
        self._pushed[shard] = clock
        collector, key = self.collector(shard), (shard, clock)
        if collector != self._rank:
            if collector not in self._up:
                return [SeparatePush(shard, clock)]
            if offer is None:
                return [ToPeer(collector, PushAlone(shard, clock)), SeparatePush(shard, clock)]
            self._offered.add(key)
            at, payload = (offer, None) if isinstance(offer, SharedRange) else (None, offer)
            return [ToPeer(collector, HostPush(shard, clock, part.weight, part.present, at), payload)]
        if offer is None or not self._complete or clock <= self._separate_until[shard]:
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
        """Record that a HostSumTask is complete; return whether its sum is to be pushed."""
        if self._state.get((shard, clock)) is not CollectionState.SUMMING:
            return False
        self._state[shard, clock] = CollectionState.SENT
        return True

    def on_push_staged(self, shard: int, clock: int) -> None:
        """Record that this worker's pushes of a shard up to `clock` are complete at its server."""
        for key in [key for key in self._state if key[0] == shard and key[1] <= clock]:
            del self._state[key], self._gradients[key]
        self._offered.difference_update([key for key in self._offered if key[0] == shard and key[1] <= clock])

    # ---- messages of others of the host ---------------------------------------------------------------------------

    def on_host_push(self, shard: int, clock: int, part: RankGradients) -> list[Act]:
        """Handle the gradients that a member offers."""
        key = shard, clock
        if clock <= self._pushed[shard] and self._state.get(key) is not CollectionState.GATHERING:
            return [ToPeer(part.rank, PushAlone(shard, clock))]  # this worker's push has been sent
        if not self._complete or clock <= self._separate_until[shard]:
            return [ToPeer(part.rank, PushAlone(shard, clock)), *self._separate(key)]
        self._gradients.setdefault(key, {})[part.rank] = part
        return self._sum_if_complete(key)

    def on_push_alone(self, rank: int, shard: int, clock: int) -> list[Act]:
        """Handle a member's separate push, or the collector's request to push separately."""
        if self.collector(shard) == self._rank:
            self._gradients.get((shard, clock), {}).pop(rank, None)
            return self._separate((shard, clock))
        if rank != self.collector(shard) or (shard, clock) not in self._offered:
            return []
        self._offered.remove((shard, clock))
        return [SeparatePush(shard, clock)]

    def on_peer_connected(self, rank: int, outstanding: Iterable[tuple[int, int]]) -> list[Act]:
        """Handle a new connection to a worker of this host.

        Args:
            rank: the worker's.
            outstanding: (shard, clock) of the pushes that this worker has made and that are not Pushed.
        """
        if rank not in self._group:
            return []  # a replacement of another host's worker
        self._up.add(rank)
        separate = {*outstanding, *enumerate(self._pushed)}  # a worker that starts in mid-run pushes nothing before
        return [ToPeer(rank, PushAlone(*key)) for key in sorted(separate) if self.collector(key[0]) == rank]

    def on_peer_disconnected(self, rank: int) -> list[Act]:
        """Handle the loss of the connection to a worker of the group: no push waits for it."""
        self._up.discard(rank)
        acts: list[Act] = []
        for key in sorted(key for key in self._offered if self.collector(key[0]) == rank):
            self._offered.remove(key)
            acts.append(SeparatePush(*key))
        for shard in range(len(self._pushed)):
            if self.collector(shard) == self._rank:  # its replacement may have pushed the next clock already
                for clock in (self._pushed[shard], self._pushed[shard] + 1):
                    acts += self._separate((shard, clock))
        return acts

    def _separate(self, key: tuple[int, int]) -> list[Act]:
        """Make all ranks of a push that is not sent yet push separately."""
        shard, clock = key
        state = self._state.get(key)
        if state is CollectionState.SENT or (state is None and clock <= self._pushed[shard]):
            return []
        self._separate_until[shard] = max(self._separate_until[shard], clock)
        return [*self._break_up(key), *([SeparatePush(shard, clock)] if state is not None else [])]

    # ---- servers --------------------------------------------------------------------------------------------------

    def break_up_shard(self, shard: int) -> list[ToPeer]:
        """Make all ranks push a shard separately: its server requests all that is outstanding, or is lost.

        This worker's own pushes are not among the outputs: the caller decides when they can be sent.
        """
        messages: list[ToPeer] = []
        for key in sorted(key for key in self._offered if key[0] == shard):
            self._offered.remove(key)
            messages.append(ToPeer(self.collector(shard), PushAlone(*key)))
        for key in sorted(key for key in self._state if key[0] == shard):
            messages += self._break_up(key)
        return messages

    def _break_up(self, key: tuple[int, int]) -> list[ToPeer]:
        """Send PushAlone to the members that have offered gradients for a push."""
        self._state.pop(key, None)
        members = self._gradients.pop(key, {})
        return [ToPeer(rank, PushAlone(*key)) for rank in self._group if rank in members and rank in self._up]
