"""A worker's position in its data, and its side of the agreement on which ranks share the examples of each clock.

coordinator/state/example_division.py has the agreement and its proof.

coordinator                    every worker
NextClockWanted(ticket) --->   answers at once, from its network thread, and begins no clock from there on
                     <------   NextClock(ticket, p)       p: the first clock that it has not begun
ExamplesShared(clock m) --->   m >= every p: the new shares hold from clock m on
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec

from psctl.errors import TimedOut
from psctl.job.examples import share
from psctl.job.membership_messages import ExamplesShared
from psctl.types import Range, StateValue

KEPT = 8
"""Clocks, beyond the staleness, with remembered batches: more than a change of members refers back to."""


class DataPosition(msgspec.Struct, frozen=True):
    """The next batch to train on.

    `loop` counts the calls of run.epochs. `loader` counts those of run.loader, within an epoch from the start of its
    loop (-1: a loader of the script's own, whose position in the epoch is unknown). `clock` counts the loader's batches
    of the epoch.
    """

    loop: int = 0
    epoch: int = 0
    loader: int = -1
    clock: int = 0


def position_from(state: Mapping[str, StateValue]) -> DataPosition:
    """Return the position in a checkpoint's state."""
    return DataPosition(*(int(state.get(name, 0)) for name in ("loop", "epoch", "loader", "clock")))


class ExampleShare:
    """A worker's record of the ranks that take part in each clock.

    The network thread calls `next_clock` and `add_change`, the main thread the rest.

    Args:
        world: ranks at the start of the job.
        first: the first clock of this worker.
        elastic: whether members may change at all.
        staleness: clocks that workers may be apart.
        timeout: seconds to wait for an ExamplesShared that was promised.
    """

    def __init__(
        self, world: int, first: int = 0, *, elastic: bool = False, staleness: int = 0, timeout: float = 120.0
    ) -> None:
        self.elastic, self.span = elastic, staleness + KEPT
        self._changed = threading.Condition()
        self._first_ranks = tuple(range(world))
        self._next = first  # the first clock that was not begun
        self._answers: dict[int, int] = {}  # ticket -> clock, until ExamplesShared arrives
        self._changes: list[ExamplesShared] = []
        self._timeout = timeout

    def next_clock(self, ticket: int) -> int:
        """Return the first clock that was not begun: the answer to NextClockWanted(ticket)."""
        with self._changed:
            self._answers[ticket] = self._next
            return self._next

    def add_change(self, shared: ExamplesShared) -> None:
        """Add a change of members."""
        with self._changed:
            self._changes.append(shared)
            self._answers = {ticket: clock for ticket, clock in self._answers.items() if ticket > shared.ticket}
            self._changed.notify_all()

    def begin_clock(self, clock: int) -> list[ExamplesShared]:
        """Begin a clock, or continue it; returns all changes at or before it, in order. Waits for a proposed one.

        Raises:
            TimedOut: the coordinator asked which clocks are begun, and sent no change.
        """
        with self._changed:
            self._wait(clock)
            self._next = max(self._next, clock + 1)
            return [shared for shared in self._changes if shared.clock <= clock]

    def settle(self) -> None:
        """Return when no change is being agreed on.

        Raises:
            TimedOut: as `begin_clock`.
        """
        with self._changed:
            self._wait(None)

    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part in the newest clock that was begun."""
        with self._changed:
            return members_after([shared for shared in self._changes if shared.clock < self._next], self._first_ranks)

    def is_settled(self, clock: int | None) -> bool:
        """Return whether `begin_clock(clock)`, or with None `settle`, would return at once."""
        return not any(clock is None or clock >= at for at in self._answers.values())

    def _wait(self, clock: int | None) -> None:
        if not self._changed.wait_for(lambda: self.is_settled(clock), self._timeout):
            raise TimedOut(
                f"the coordinator asked which clocks are begun and sent no change of members in {self._timeout:.0f} s",
                "its log on the head host says what it was doing",
            )


def parts_after(changes: Sequence[ExamplesShared]) -> tuple[int, ...]:
    """Return the parts of the members after these changes; empty: all have as many examples."""
    return tuple(changes[-1].parts) if changes else ()


def members_after(changes: Sequence[ExamplesShared], first: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks after these changes of the `first` ones."""
    return tuple(changes[-1].ranks) if changes else tuple(first)


class Batch(msgspec.Struct, frozen=True):
    """One clock's examples of an epoch's order, over all ranks; remembered until the clock is sure to count."""

    step: int
    epoch: int
    ranges: tuple[Range, ...]
    ranks: tuple[int, ...]
    parts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Examples in it."""
        return sum(map(len, self.ranges))

    def of(self, rank: int) -> tuple[Range, ...]:
        """Return a rank's share, by `parts` or evenly, in rank order; empty for a rank that is not in `ranks`."""
        if rank not in self.ranks:
            return ()
        part = share(Range(0, self.size), len(self.ranks), self.ranks.index(rank), self.parts)
        return slice_ranges(self.ranges, part.start, part.stop)


def slice_ranges(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return the part [start, stop) of the concatenation of ranges."""
    found, before = [], 0
    for one in ranges:
        part = one.meet(Range(one.start + start - before, one.start + stop - before))
        if len(part):
            found.append(part)
        before += len(one)
    return tuple(found)


def returned_examples(changes: Sequence[ExamplesShared], batches: Sequence[Batch], epoch: int) -> tuple[Range, ...]:
    """Return the examples of an epoch's batches to train on again: lost ranks', of clocks that these changes drop."""
    return tuple(
        part
        for shared in changes
        for rank, first in sorted(shared.lost.items())
        for batch in batches
        if batch.epoch == epoch and first <= batch.step < shared.clock
        for part in batch.of(rank)
    )
