"""One worker's side of who shares the examples of each clock; coordinator/state/example_division.py has the
agreement and why it is sure.

coordinator                    every worker
NextClockWanted(ticket) --->   answers at once, from its network thread, and begins no clock from there on
                     <------   NextClock(ticket, p)       p: the first clock that it has not begun
ExamplesShared(clock m) --->   m >= every p: from clock m on the shares are other ones
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from psctl.errors import TimedOut
from psctl.job.examples import share
from psctl.job.membership_messages import ExamplesShared
from psctl.types import Range

KEPT = 8
"""Clocks, beyond the staleness, whose batches are remembered: more than a change of members looks back."""


class ExampleDivision:
    """Who takes part in which clock; `asked` and `heard` are the network thread's, the rest is the main one's.

    Args:
        world: ranks at the start of the job.
        first: the first clock of this worker.
        elastic: whether members may change at all.
        staleness: clocks that workers may be apart.
        patience: seconds to wait for an ExamplesShared that was promised.
    """

    def __init__(
        self, world: int, first: int = 0, *, elastic: bool = False, staleness: int = 0, patience: float = 120.0
    ) -> None:
        self.elastic, self.span = elastic, staleness + KEPT
        self._changed = threading.Condition()
        self._everyone = tuple(range(world))
        self._next = first  # the first clock that was not begun
        self._open: dict[int, int] = {}  # ticket -> clock answered
        self._heard: list[ExamplesShared] = []
        self._patience = patience

    def asked(self, ticket: int) -> int:
        """Return the first clock that was not begun: the answer to NextClockWanted(ticket)."""
        with self._changed:
            self._open[ticket] = self._next
            return self._next

    def heard(self, shared: ExamplesShared) -> None:
        """Take in a change of members."""
        with self._changed:
            self._heard.append(shared)
            self._open = {ticket: clock for ticket, clock in self._open.items() if ticket > shared.ticket}
            self._changed.notify_all()

    def begin(self, clock: int) -> list[ExamplesShared]:
        """Begin a clock, or go on with it; returns all changes at or before it, in order. Waits for one that may be.

        Raises:
            TimedOut: the coordinator asked which clocks are begun, and never said what follows.
        """
        with self._changed:
            self._wait(clock)
            self._next = max(self._next, clock + 1)
            return [shared for shared in self._heard if shared.clock <= clock]

    def settle(self) -> None:
        """Return when no change is being agreed on.

        Raises:
            TimedOut: as `begin`.
        """
        with self._changed:
            self._wait(None)

    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part in the newest clock that was begun."""
        with self._changed:
            return members_of([shared for shared in self._heard if shared.clock < self._next], self._everyone)

    def free(self, clock: int | None) -> bool:
        """Tell whether `begin(clock)`, or with None `settle`, would return at once."""
        return not any(clock is None or clock >= at for at in self._open.values())

    def _wait(self, clock: int | None) -> None:
        if not self._changed.wait_for(lambda: self.free(clock), self._patience):
            raise TimedOut(
                f"the coordinator asked who has begun what and did not say more in {self._patience:.0f} s",
                "its log on the head host says what it was doing",
            )


def members_of(changes: Sequence[ExamplesShared], everyone: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks after these changes."""
    return tuple(changes[-1].ranks) if changes else tuple(everyone)


class Batch(msgspec.Struct, frozen=True):
    """What one clock took of an epoch's order, over all ranks; remembered until it is sure to count."""

    step: int
    epoch: int
    ranges: tuple[Range, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Examples in it."""
        return sum(map(len, self.ranges))

    def of(self, rank: int) -> tuple[Range, ...]:
        """Return a rank's share, evenly in rank order; nothing if it has no part in this."""
        if rank not in self.ranks:
            return ()
        part = share(Range(0, self.size), len(self.ranks), self.ranks.index(rank))
        return within(self.ranges, part.start, part.stop)


def within(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return what lies at [start, stop) of ranges laid end to end."""
    found, before = [], 0
    for one in ranges:
        part = one.meet(Range(one.start + start - before, one.start + stop - before))
        if len(part):
            found.append(part)
        before += len(one)
    return tuple(found)


def owed(changes: Sequence[ExamplesShared], batches: Sequence[Batch], epoch: int) -> tuple[Range, ...]:
    """Return what these changes give back of the batches of an epoch: what lost ranks took and what does not count."""
    return tuple(
        part
        for shared in changes
        for rank, first in sorted(shared.lost.items())
        for batch in batches
        if batch.epoch == epoch and first <= batch.step < shared.clock
        for part in batch.of(rank)
    )
