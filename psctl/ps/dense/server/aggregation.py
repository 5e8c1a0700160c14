"""Aggregation of a shard's pushes: the mean gradient of a clock (bsp, ssp), or one worker's push (asp).

Theory. bsp and ssp (`ClockAggregation`): at version v, clock v is under way:

    push of rank r   staged in a buffer of its own until complete
    sum              ranks are added in rank order: rank 0's buffer becomes the sum, rank 1's is added when complete ...
                     a push ahead of its turn stays staged; so the sum is bitwise equal for every order of arrival.
                     Shared memory of a worker is only read: the first two pushes together make the sum.
                     Where workers share a host, their host sum is added as one, in the turn of its first rank: it
                     arrives as one push, or is made here when all their pushes are complete (host_sums.py)
    mean             the sum divided by the sum of weights

If a push that is already in the sum must be excluded, the clock is undone: the sum is discarded, and the ranks in it
are asked to push again. asp (`AsyncAggregation`): a rank's push is ready when it is complete and its step order has
arrived, oldest first. When a checkpoint was ordered at clock v, no clock from v on is ready before all ranks' clocks
up to v-1 are applied, so that the checkpoint holds the same clocks of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from psctl.ps.dense.clock_ledger import Membership, StepOrder
from psctl.ps.dense.host_sums import RankGradients, host_sum, in_turn, joint_weight
from psctl.ps.dense.server.push_staging import PushStaging, ReadyGradient, StagedPush, StagedTransfer
from psctl.ps.dense.shard_state import ShardEntry, ShardState
from psctl.ps.pieces import bytes_view

SUM = StepOrder([], None, False)
"""The step order of every clock where workers step."""

NEAR = 1e-9
"""Relative tolerance; a sum of weights this near to the number of workers differs from it by rounding only."""


class ClockAggregation(PushStaging):
    """bsp and ssp: one step a clock, when the pushes of all its members are complete."""

    def __init__(self, state: ShardState, membership: Membership) -> None:
        super().__init__(state, membership)
        terms = state.terms
        self._hosts = terms.hosts if self._coder is None and terms.staleness == 0 else ()
        self._sum_order: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] = (), ()  # ranks, and as summed
        self._reset_sum()

    def sum_order(self, clock: int) -> tuple[tuple[int, ...], ...]:
        ranks = self.membership.at(clock)
        if ranks is not self._sum_order[0]:
            self._sum_order = ranks, in_turn(self._hosts, ranks)
        return self._sum_order[1]

    def _reset_sum(self) -> None:
        self._sum: torch.Tensor | None = None  # of the clock under way, over the first `_next` groups
        self._first: StagedPush | None = None  # or the sum is this push alone, in shared memory
        self._next = 0
        self._covered: tuple[int, ...] = ()  # ranks in it that arrived in host sums
        self._weight = 0.0
        self._sum_present = bytes(len(self._state.held))
        self._divided = False

    @property
    def clocks(self) -> int:
        return self._done(-1) + 1

    def _done(self, rank: int) -> int:
        return (self._state.terms.base if self._state.version is None else self._state.version) - 1

    def clock_mean(self) -> tuple[torch.Tensor, bytes] | None:
        if self._state.version is None:
            return None
        clock = self._state.version
        turns = self.sum_order(clock)
        while self._next < len(turns):
            if not self._add_turn(clock, turns[self._next]):
                return None
            self._next += 1
        if not self._divided:
            world = len(self._sum_order[0])
            near = self._weight == 0 or abs(self._weight - world) <= NEAR * world
            total, by = self._own_sum(), world if near else self._weight
            if by != 1:
                total.div_(by)
            self._divided = True
        assert self._sum is not None, "a clock has at least one member"
        return self._sum, self._sum_present

    def _add_turn(self, clock: int, ranks: tuple[int, ...]) -> bool:
        """Add the pushes of a host, or of a rank that is alone on its host, if they are all complete."""
        if len(ranks) == 1:
            one = self._staged.get((clock, ranks[0]))
            if one is None or not one.whole:
                return False
            self._add(self._staged.pop((clock, ranks[0])))
            return True
        found = [(rank, self._staged.get((clock, rank))) for rank in ranks]
        whole = [(rank, staged) for rank, staged in found if staged is not None and staged.whole]
        together = [(rank, staged) for rank, staged in whole if staged.covers]
        if not together and len(whole) < len(ranks):
            return False
        for rank, staged in together[:1]:
            del self._staged[clock, rank]
            self._covered += staged.covers
            self._add(staged)
            return True
        for rank, _ in whole:
            del self._staged[clock, rank]
        self._add_host(whole)
        return True

    def _add_host(self, pushes: Sequence[tuple[int, StagedPush]]) -> None:
        """Add the host sum of ranks that pushed separately."""
        parts = [RankGradients(rank, staged.weight, staged.present, staged.buffer) for rank, staged in pushes]
        first, rest = pushes[0][1], [staged for _, staged in pushes]
        self._weight += joint_weight(part.weight for part in parts)
        begun = self._sum is not None or self._first is not None
        if begun:
            total = self._own_sum()
        elif first.shared:
            total = self._state.take_buffer()
        else:
            total, rest = first.buffer, rest[1:]
        present = host_sum(total, self._state.held, parts, onto=begun)
        self._sum_present = bytes(a | b for a, b in zip(self._sum_present, present, strict=True)) if begun else present
        self._sum = total
        for staged in rest:
            self._release(staged)

    def _add(self, staged: StagedPush) -> None:
        """Add one rank's gradients; pieces without a gradient count as zero, whatever their bytes are."""
        held, whole = self._state.held, all(staged.present)
        self._weight += staged.weight
        if self._coder is not None:  # read and summed in one pass
            self._sum_present = bytes(a | b for a, b in zip(self._sum_present, staged.present, strict=True))
            self._sum = self._state.take_buffer().zero_() if self._sum is None else self._sum
            self.add_code(staged, self._sum, staged.weight)
            return
        if staged.weight != 1.0 and not staged.covers:  # a host sum is weighted already
            staged = StagedPush(1.0, staged.present, staged.size, self.own_gradient(staged).mul_(staged.weight))
        if self._sum is None and self._first is None:
            self._sum_present = staged.present
            if staged.shared and whole:
                self._first = staged
                return
            self._sum = self.own_gradient(staged)
            for piece, there in () if whole else zip(held, staged.present, strict=True):
                if not there:
                    self._sum.narrow(0, piece.at, piece.size).zero_()
            return
        self._sum_present = bytes(a | b for a, b in zip(self._sum_present, staged.present, strict=True))
        if whole and self._first is not None:
            self._sum = torch.add(self._first.buffer, staged.buffer, out=self._state.take_buffer())
            self._first = None
        elif whole:
            self._own_sum().add_(staged.buffer)
        else:
            total = self._own_sum()
            for piece, there in zip(held, staged.present, strict=True):
                if there:
                    where = (0, piece.at, piece.size)
                    total.narrow(*where).add_(staged.buffer.narrow(*where))
        self._release(staged)

    def _own_sum(self) -> torch.Tensor:
        if self._first is not None:
            self._sum, self._first = self.own_gradient(self._first), None
        assert self._sum is not None, "someone was summed"
        return self._sum

    def next_ready(self) -> ReadyGradient | None:
        if not self._staged and self._sum is None and self._first is None:
            return None  # nothing of the clock under way has arrived
        found = self.clock_mean()
        if found is None or self._state.version is None:
            return None
        clock = self._state.version
        order = SUM if self._state.terms.update == "worker" else self._pop_order(clock)
        if order is None:
            return None
        ready = ReadyGradient(ShardEntry(clock, order, found[1], self._sum_order[0]), found[0])
        self._reset_sum()
        return ready

    def _pop_order(self, clock: int) -> StepOrder | None:
        """Remove and return the order to step `clock`, whichever of the two is there."""
        in_backward = self._in_backward.pop(clock, None)
        return self._orders.pop((clock, -1), in_backward)

    def drop_and_undo(self, rank: int, clock: int) -> None:
        now = self._state.version
        self.drop_after(rank, clock)
        if now is not None and now > clock and any(rank in ranks for ranks in self.sum_order(now)[: self._next]):
            self._undo(now)

    def set_members(self, membership: Membership) -> None:
        now = self._state.version
        before = () if now is None else self.sum_order(now)[: self._next]
        self.membership = membership
        if now is not None and before != self.sum_order(now)[: self._next]:
            self._undo(now)
        for clock, rank in [key for key, one in self._staged.items() if one.covers]:
            if self._staged[clock, rank].covers not in self.sum_order(clock):
                self.drop(clock, rank)

    def last_separate_clock_of(self, rank: int) -> int:
        return (
            min(super().last_separate_clock_of(rank), self._done(-1))
            if rank in self._covered
            else super().last_separate_clock_of(rank)
        )

    def _undo(self, clock: int) -> None:
        """Discard the sum and its clock's staged pushes: their ranks still have them, and push them again."""
        if self._sum is not None:
            self._state.give_buffer(self._sum)
        self._reset_sum()
        for one in {*self.membership.everyone, *self.taken}:
            if self.clock_of(one) >= clock:
                self.drop_after(one, clock - 1)
        self.given_up.update(self.membership.everyone)

    def clear(self) -> None:
        super().clear()
        if self._sum is not None:
            self._state.give_buffer(self._sum)
        self._reset_sum()

    def _add_sum_to(self, transfer: StagedTransfer) -> StagedTransfer:
        if self._sum is None and self._first is None:
            return transfer
        under_way = {"summed": self._next, "weight": self._weight, "joint": self._sum_present, "divided": self._divided}
        under_way["covered"] = self._covered
        return msgspec.structs.replace(transfer, **under_way)

    def _sum_bytes(self) -> list[memoryview]:
        return [bytes_view(self._own_sum())] if self._sum is not None or self._first is not None else []

    def _take_sum(self, transfer: StagedTransfer, data: memoryview) -> None:
        self._sum = self._state.take_buffer()
        bytes_view(self._sum)[:] = data
        self._next, self._weight, self._sum_present = transfer.summed, transfer.weight, transfer.joint
        self._divided, self._covered = transfer.divided, transfer.covered


class AsyncAggregation(PushStaging):
    """asp: one step a push."""

    @property
    def clocks(self) -> int:
        return 1 + min(self.applied_of(rank) for rank in self.membership.changes[-1][1])

    def _done(self, rank: int) -> int:
        return self.applied_of(rank)

    def sum_order(self, clock: int) -> tuple[tuple[int, ...], ...]:
        return tuple((rank,) for rank in self.membership.at(clock))

    def next_ready(self) -> ReadyGradient | None:
        held_from = min(self.saves, default=None)
        for (clock, rank), staged in self._staged.items():
            order = self._orders.get((clock, rank))
            if not staged.whole or order is None or (held_from is not None and clock >= held_from):
                continue
            if clock != self._done(rank) + 1:
                continue
            del self._staged[clock, rank], self._orders[clock, rank]
            gradient = self.own_gradient(staged)
            for piece, there in zip(self._state.held, staged.present, strict=True):
                if not there:
                    gradient.narrow(0, piece.at, piece.size).zero_()
            return ReadyGradient(ShardEntry(clock, order, staged.present, (rank,)), gradient)
        return None

    def drop_and_undo(self, rank: int, clock: int) -> None:
        self.drop_after(rank, self._done(rank))

    def missing_ranks(self, needed: int) -> list[int]:
        return [rank for rank in self.membership.changes[-1][1] if self.applied_of(rank) < needed - 1]


def intake(state: ShardState, membership: Membership) -> PushStaging:
    """Return the aggregation for the job's consistency model."""
    return AsyncAggregation(state, membership) if state.terms.staleness is None else ClockAggregation(state, membership)


def square(gradient: torch.Tensor) -> float:
    """Return the square of the 2-norm, summed in float64."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return float(real.to(torch.float64).square().sum())


def squares(state: ShardState, mean: torch.Tensor, present: Sequence[int]) -> list[float | None]:
    """Return the square of each piece's norm; None where no worker had a gradient."""
    return [
        square(mean.narrow(0, piece.at, piece.size)) if there else None
        for piece, there in zip(state.held, present, strict=True)
    ]
