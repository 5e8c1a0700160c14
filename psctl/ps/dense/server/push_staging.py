"""Pushes that a shard has received and not applied, the vector clock and step orders, and their transfer.

The vector clock holds the last clock of each rank that is *staged* (`taken`): received completely. A push older than
that is a duplicate; one that skips a clock was sent before this server led the shard and is sent again. Which gradient
is ready to be applied depends on the consistency model: aggregation.py.

A *host sum* (host_sums.py) is the push of all ranks that it covers: when it is complete their clocks advance together.
It counts only if none of their pushes has arrived separately and they are all the members of their host; else it is
dropped, and the ranks without another push are asked to push. So duplicates and the order of arrival do not
matter.

Bytes may still be arriving for a push that no longer counts: its buffer is not reused until they are received, or their
connection is lost.

A transfer to a new primary consists of a head (StagedTransfer), the sum under way if there is one, and the bytes of the
pushes, in their order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.compression.error_feedback import coder
from psctl.ps.dense.clock_ledger import Membership, StepOrder
from psctl.ps.dense.shard_state import ShardEntry, ShardState, Terms
from psctl.ps.messages import Push
from psctl.ps.pieces import Piece, bytes_view, torch_dtype
from psctl.types import UNDECODABLE, Shard


class StagedPush:
    """A push that is being received, or waits for the sum; a `shared` one is in the worker's own memory.

    `size`: its bytes, at the start of `buffer`. `covers`: the ranks of a host sum; (): the sender alone. `whole`: its
    bytes have arrived.
    """

    def __init__(
        self, weight: float, present: bytes, size: int, buffer: torch.Tensor, covers: tuple[int, ...] = (), *,
        shared: bool = False, whole: bool = True,
    ) -> None:  # fmt: skip
        self.weight, self.present, self.size, self.covers, self.shared = weight, present, size, covers, shared
        self.whole = whole
        self.void = False  # it no longer counts, and its bytes are still arriving
        self.buffer = buffer


class TransferredPush(msgspec.Struct, frozen=True):
    """A staged push in a transfer; its bytes follow if any piece is present."""

    clock: int
    rank: int
    weight: float
    present: bytes
    size: int
    covers: tuple[int, ...] = ()


class StagedTransfer(msgspec.Struct, frozen=True):
    """Head of a transfer: vector clock, orders (by clock and rank), staged pushes, saves, the sum under way."""

    taken: dict[int, int]
    orders: list[tuple[int, StepOrder]]
    pushes: list[TransferredPush]
    saves: list[int]
    summed: int = -1  # hosts and single ranks in the sum (host_sums.in_turn); -1: there is none
    weight: float = 0.0
    joint: bytes = b""
    divided: bool = False
    covered: tuple[int, ...] = ()  # ranks in the sum whose gradients arrived in host sums


_TRANSFER = msgspec.msgpack.Decoder(StagedTransfer)


def read_transfer(head: bytes, shard: int) -> StagedTransfer:
    """Decode the head of another server's transfer.

    Raises:
        ProtocolError: it is not such a head.
    """
    try:
        return _TRANSFER.decode(head)
    except UNDECODABLE as error:
        raise ProtocolError(f"shard {shard}: no transfer: {error}") from error


class ReadyGradient(msgspec.Struct, frozen=True):
    """A gradient that can be applied now, and its step order."""

    entry: ShardEntry
    gradient: torch.Tensor


def largest_payload(terms: Terms, shard: Shard, held: Sequence[Piece]) -> int:
    """Return the most bytes that a worker may send for a shard: its start values, or its gradients or their code."""
    dtype = torch_dtype(shard.dtype)
    code = coder(terms.compression, dtype)
    return max(len(shard.range) * dtype.itemsize, 0 if code is None else code.limit(held))


class PushStaging(ABC):
    """Staging of pushes, common to both aggregations.

    Args:
        state: the shard's state, which also provides buffers.
        membership: the members of each clock.
    """

    def __init__(self, state: ShardState, membership: Membership) -> None:
        self.membership = membership
        self.taken: dict[int, int] = {}  # by rank; see `clock_of`
        self.saves: set[int] = set()  # versions to make a checkpoint of
        self.given_up: set[int] = set()  # ranks whose staged push was dropped: they must push again
        self._state = state
        self._coder = coder(state.terms.compression, state.values.dtype)
        self._limit = self._coder.limit(state.held) if self._coder is not None else state.nbytes
        self._spare: list[torch.Tensor] = []  # buffers for codes
        self._staged: dict[tuple[int, int], StagedPush] = {}  # (clock, rank), in order of arrival
        self._orders: dict[tuple[int, int], StepOrder] = {}  # (clock, rank; -1: all ranks)
        self._in_backward: dict[int, StepOrder] = {}  # by clock: orders for this shard alone
        self._withdrawn = 0  # clocks before it accept no such order

    def clock_of(self, rank: int) -> int:
        """Return the last clock of a rank that is staged or applied here."""
        return max(self.taken.get(rank, -1), self.applied_of(rank))

    def applied_of(self, rank: int) -> int:
        """Return the last clock of a rank that is applied; before the first of its term, the clock before that."""
        before = self.membership.since(rank) - 1
        return max(self._state.applied.get(rank, before), before)

    # ---- pushes ---------------------------------------------------------------------------------------------------

    def receive_buffer_for(self, rank: int, message: Push, size: int) -> memoryview | None:
        """Return the buffer for a push's bytes; None when they are not needed.

        Raises:
            ProtocolError: wrong size or clock; the worker's fault, and nothing was changed.
        """
        if message.at is not None and size:
            raise self.error(rank, "a push with a payload and a place in shared memory")
        belong = 0 if not any(message.present) else self._state.nbytes if self._coder is None else size
        if size != belong or size > self._limit:
            raise self.error(rank, f"push of {size} bytes where {min(belong, self._limit)} belong")
        if message.clock <= self.clock_of(rank) or not self._is_next(rank, message):
            return None
        buffer = self._new_buffer()
        self._staged[message.clock, rank] = StagedPush(
            message.weight, message.present, size, buffer, message.covers, whole=False
        )
        return self._state.bytes_of(buffer)[:size]

    def _is_next(self, rank: int, message: Push) -> bool:
        """Return whether this push is the next one; its bytes from before a broken connection are dropped."""
        self._forget(message.clock, rank)
        if not self._is_valid_sum(message.clock, message.covers or (rank,)):
            return False
        self._check(rank, message)
        return True

    def _is_valid_sum(self, clock: int, ranks: tuple[int, ...]) -> bool:
        """Return whether a push of these ranks is the next one of each; a host sum must also cover all of the host."""
        if len(ranks) == 1:
            return clock == self.clock_of(ranks[0]) + 1 and ranks[0] in self.membership.at(clock)
        return all(clock == self.clock_of(rank) + 1 for rank in ranks) and ranks in self.sum_order(clock)

    @abstractmethod
    def sum_order(self, clock: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a clock in groups, in the order of summation."""

    def add_shared(self, rank: int, message: Push, shared: memoryview) -> tuple[int, ...]:
        """Stage a push that is in its worker's memory and stays there until it is Pushed; return the ranks whose clock
        is complete with it: possibly none.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        assert message.at is not None, "the caller has found its bytes"
        if not self._is_next(rank, message):
            return ()
        dtype, size = self._buffer_dtype, self._state.nbytes if self._coder is None else min(len(shared), self._limit)
        align = dtype.itemsize if self._coder is None else 8
        if len(shared) != size or not size or message.at.offset % align or not any(message.present):
            raise self.error(rank, f"push at {message.at} where {size} bytes of {dtype} belong")
        staged = StagedPush(message.weight, message.present, size, torch.frombuffer(shared, dtype=dtype), shared=True)
        self._check_code(rank, staged)
        self._staged[message.clock, rank] = staged
        self.taken[rank] = message.clock
        return (rank,)

    def add_received(self, rank: int, message: Push, size: int) -> tuple[int, ...]:
        """Count a push whose bytes have arrived; return the ranks for which it completes the clock.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if size == 0:
            self.receive_buffer_for(rank, message, 0)
        staged = self._staged.get((message.clock, rank))
        if staged is None or staged.void or message.clock <= self.clock_of(rank):
            self.give_up(rank, message)
            return ()
        staged.whole = True
        try:
            self._check_code(rank, staged)
        except ProtocolError:
            self._forget(message.clock, rank)
            raise
        if not staged.covers:
            self.taken[rank] = message.clock
            return (rank,)
        # A covered rank may have pushed separately meanwhile, or have left.
        if not self._is_valid_sum(message.clock, staged.covers):
            self.give_up(rank, message)
            return ()
        self.taken.update(dict.fromkeys(staged.covers, message.clock))
        return staged.covers

    def give_up(self, rank: int, message: Push) -> None:
        """Drop a push that does not count."""
        staged, covers = self._staged.get((message.clock, rank)), message.covers
        if staged is not None and not (staged.whole and message.clock <= self.clock_of(rank)):
            self._forget(message.clock, rank)
        waiting = [one for one in covers if self.clock_of(one) < message.clock]
        self.given_up.update(one for one in waiting if one in self.membership.everyone)

    @property
    def _buffer_dtype(self) -> torch.dtype:
        return self._state.values.dtype if self._coder is None else torch.uint8

    def _new_buffer(self) -> torch.Tensor:
        """Return a buffer for a push."""
        if self._coder is None:
            return self._state.take_buffer()
        return self._spare.pop() if self._spare else torch.empty(self._limit, dtype=torch.uint8)

    def _check_code(self, rank: int, staged: StagedPush) -> None:
        """Check that a complete push can be summed.

        Raises:
            ProtocolError: it is not a code of this shard's gradients; the worker's fault.
        """
        if self._coder is None:
            return
        try:
            self._coder.check(staged.buffer[: staged.size], self._state.held, staged.present)
        except ValueError as error:
            raise self.error(rank, f"a push that is no code of its gradients: {error}") from None

    def _check(self, rank: int, message: Push) -> None:
        terms, held = self._state.terms, self._state.held
        if self._state.version is None:
            raise self.error(rank, "push before there are start values")
        if terms.staleness is not None and message.clock > self._state.version + terms.staleness + 1:
            raise self.error(rank, f"push of clock {message.clock} at version {self._state.version}")
        if len(message.present) != len(held) or message.present.strip(b"\x00\x01"):
            raise self.error(rank, f"push for {len(message.present)} pieces where {len(held)} are")
        if not (math.isfinite(message.weight) and message.weight >= 0):
            raise self.error(rank, f"push with weight {message.weight}")
        if message.covers and message.at is not None:
            raise self.error(rank, f"push of the host sum of {message.covers}, which is not sent")

    def drop(self, clock: int, rank: int) -> None:
        """Exclude a staged push; a host sum is excluded for all of its ranks."""
        staged = self._staged.get((clock, rank))
        if staged is None:
            return
        if not staged.whole:
            staged.void = True
            return
        self._forget(clock, rank)
        for one in staged.covers:
            self.taken[one] = min(self.clock_of(one), clock - 1)
        self.given_up.update(staged.covers)

    def _forget(self, clock: int, rank: int) -> None:
        """Remove a staged push; none of its bytes may still be arriving."""
        staged = self._staged.pop((clock, rank), None)
        if staged is not None:
            self._release(staged)

    def _release(self, staged: StagedPush) -> None:
        if staged.shared:
            return
        if self._coder is None:
            self._state.give_buffer(staged.buffer)
        else:
            self._spare.append(staged.buffer)

    def own_gradient(self, staged: StagedPush) -> torch.Tensor:
        """Return a staged push's gradients in a buffer that may be changed; the push is removed."""
        if self._coder is None:
            return self._state.take_buffer().copy_(staged.buffer) if staged.shared else staged.buffer
        total = self._state.take_buffer().zero_()
        self.add_code(staged, total, 1.0)
        return total

    def add_code(self, staged: StagedPush, total: torch.Tensor, weight: float) -> None:
        """Add a staged push that is a code, times `weight`, to a sum; the push is removed."""
        assert self._coder is not None, "others are added piece by piece"
        self._coder.add(staged.buffer[: staged.size], self._state.held, staged.present, total, weight)
        self._release(staged)

    def drop_incoming(self, rank: int) -> None:
        """Remove a rank's partly received push."""
        for clock, owner in [key for key, staged in self._staged.items() if key[1] == rank and not staged.whole]:
            self._forget(clock, owner)

    def drop_after(self, rank: int, clock: int) -> None:
        """Remove a rank's staged pushes after `clock`, host sums that include it, and its own orders."""
        for later, owner in [key for key, one in self._staged.items() if rank in (key[1], *one.covers)]:
            if later > clock:
                self.drop(later, owner)
        for key in [key for key in self._orders if key[1] == rank and key[0] > clock]:
            del self._orders[key]
        self.taken[rank] = min(self.clock_of(rank), clock)

    # ---- differences between the aggregations -----------------------------------------------------------------------

    @property
    @abstractmethod
    def clocks(self) -> int:
        """The clock before which all workers' clocks are in the values."""

    def add_order(self, clock: int, order: StepOrder) -> None:
        """Record the step order of a clock."""
        if clock > self._done(order.rank):
            self._orders[clock, order.rank] = order
            if order.save:
                self.saves.add(clock + 1)

    def add_order_in_backward(self, clock: int, order: StepOrder) -> None:
        """Record an order to step a clock as soon as this shard's pushes are in."""
        if clock > self._done(-1) and clock >= self._withdrawn:
            self._in_backward[clock] = order

    def withdraw_orders_in_backward(self, before: int) -> None:
        """Drop such orders of clocks before `before`, and refuse those that come later."""
        self._withdrawn = before
        for clock in [clock for clock in self._in_backward if clock < before]:
            del self._in_backward[clock]

    @abstractmethod
    def _done(self, rank: int) -> int:
        """Return the last applied clock: of a rank, or (-1) of all ranks."""

    @abstractmethod
    def next_ready(self) -> ReadyGradient | None:
        """Remove and return the next gradient to apply; None if none is ready."""

    def clock_mean(self) -> tuple[torch.Tensor, bytes] | None:
        """Return the mean gradient of the clock under way and its presence, once it is known."""
        return None

    def drop_and_undo(self, rank: int, clock: int) -> None:
        """Drop a rank's pushes after `clock`, and sums that hold them: the other ranks push that clock again."""
        self.drop_after(rank, clock)

    def set_members(self, membership: Membership) -> None:
        """Set the members; sums of other ranks are dropped."""
        self.membership = membership

    def last_separate_clock_of(self, rank: int) -> int:
        """Return the last clock of a rank that is staged here, not counting host sums that are not applied."""
        within = [clock for (clock, _), one in self._staged.items() if one.whole and rank in one.covers]
        return min([self.clock_of(rank), *(clock - 1 for clock in within)])

    def missing_ranks(self, needed: int) -> list[int]:
        """Return the ranks that lack pushes before clock `needed`."""
        return [rank for rank in self.membership.at(max(0, needed - 1)) if self.clock_of(rank) < needed - 1]

    # ---- transfer --------------------------------------------------------------------------------------------------

    @property
    def staged_limit(self) -> int:
        """Upper bound of the bytes of the staged state."""
        pushes = len(self.membership.everyone) * self._state.terms.buffers
        return max(self._state.copy_limit, pushes * self._limit + self._state.nbytes)

    def staged_state(self) -> tuple[bytes, memoryview]:
        """Return everything that is staged and not applied: a head, and bytes that do not change."""
        whole = {key: staged for key, staged in self._staged.items() if staged.whole}
        pushes = [
            TransferredPush(clock, rank, one.weight, one.present, one.size, one.covers)
            for (clock, rank), one in whole.items()
        ]
        orders = [(clock, order) for (clock, _), order in self._orders.items()]
        head = self._add_sum_to(StagedTransfer(dict(self.taken), orders, pushes, sorted(self.saves)))
        data = [bytes_view(one.buffer)[: one.size] for one in whole.values() if one.size]
        return msgspec.msgpack.encode(head), memoryview(b"".join([*self._sum_bytes(), *data]))

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Restore what another server's `staged_state` returned.

        Raises:
            ProtocolError: it does not fit this shard.
        """
        transfer = read_transfer(head, self._state.shard.index)
        sizes = [push.size for push in transfer.pushes]
        first = self._state.nbytes if transfer.summed >= 0 else 0
        if first + sum(sizes) != len(data) or any(not 0 <= size <= self._limit for size in sizes):
            raise ProtocolError(f"shard {self._state.shard.index}: a transfer of {len(data)} bytes")
        self.clear()
        if transfer.summed >= 0:
            self._take_sum(transfer, data[:first])
        for push, size in zip(transfer.pushes, sizes, strict=True):
            buffer = self._new_buffer()
            bytes_view(buffer)[:size] = data[first : first + size]
            self._staged[push.clock, push.rank] = StagedPush(push.weight, push.present, size, buffer, push.covers)
            first += size
        for clock, order in transfer.orders:
            self.add_order(clock, order)
        self.taken, self.saves = transfer.taken, set(transfer.saves)

    def clear(self) -> None:
        """Remove everything that is not applied: workers push it again."""
        for clock, rank in list(self._staged):
            self.drop(clock, rank)
        self._orders.clear()
        self._in_backward.clear()
        self.saves.clear()
        self.given_up.clear()
        self.taken = {}

    def _add_sum_to(self, transfer: StagedTransfer) -> StagedTransfer:
        return transfer

    def _sum_bytes(self) -> list[memoryview]:
        return []

    def _take_sum(self, transfer: StagedTransfer, data: memoryview) -> None:
        raise ProtocolError(f"shard {self._state.shard.index}: a sum where there is none")

    def error(self, rank: int, what: str) -> ProtocolError:
        """Return the error for a worker's violation of the protocol."""
        return ProtocolError(f"worker/{rank}, shard {self._state.shard.index}: {what}", where=f"worker/{rank}")
