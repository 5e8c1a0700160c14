"""The members of each clock, and step orders until all members of a clock agree.

A clock may be applied only when every member of it has ordered it with the same numbers. The lowest rank's order is the
reference; a rank that differs is refused. A rank that left at clock c* counts as having ordered every clock up to c*
(its pushes of them have arrived), and nothing after. Under asp each rank's order is applied alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from psctl.ps.messages import Step, StepInBackward
from psctl.types import Number

KEPT = 4
"""Clocks, beyond the staleness, whose agreed orders are kept for shards transferred from another server."""

LONGEST = 256
"""More clocks than ranks can ever be apart; orders that far behind can no longer be agreed on."""


class StepOrder(msgspec.Struct, frozen=True):
    """How to apply one clock, as all ranks agreed. `rank`: the rank of a single push (asp); -1: all ranks."""

    groups: list[dict[str, Number]]
    scale: float | None
    save: bool
    rank: int = -1


class JobRefusal(Exception):
    """The job cannot go on; sent to every worker."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class Membership(msgspec.Struct, frozen=True):
    """The members of each clock: the ranks of the last change at or before it."""

    changes: tuple[tuple[int, tuple[int, ...]], ...]  # (first clock, ranks in order), clocks rising

    @classmethod
    def initial(cls, world: int, clock: int) -> Membership:
        """Ranks 0 .. world-1, from `clock` on."""
        return cls(((clock, tuple(range(world))),))

    def at(self, clock: int) -> tuple[int, ...]:
        """Return the ranks of a clock."""
        for first, ranks in reversed(self.changes):
            if first <= clock:
                return ranks
        return self.changes[0][1]

    def changed(self, clock: int, ranks: Sequence[int]) -> Membership:
        """Return the membership with these ranks from `clock` on; earlier changes of later clocks are dropped."""
        kept = tuple(change for change in self.changes if change[0] < clock)
        return Membership((*kept, (clock, tuple(sorted(ranks)))))

    def since(self, rank: int) -> int:
        """Return the first clock of a rank's last term as a member; of one that never was, the first of all."""
        found = self.changes[0][0]
        for (_, before), (clock, ranks) in pairwise(self.changes):
            if rank in ranks and rank not in before:
                found = clock
        return found

    def from_clock(self, clock: int) -> set[int]:
        """Return the ranks that are members of a clock or of a later one."""
        return {*self.at(clock), *(rank for first, ranks in self.changes if first > clock for rank in ranks)}

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks that are members of any clock."""
        return tuple(sorted({rank for _, ranks in self.changes for rank in ranks}))


class StepLedger:
    """Step orders of all clocks that some shard may still have to apply.

    Args:
        membership: the members of each clock.
        first: the first clock.
        staleness: None under asp, and where workers step, because nothing is ordered there.
    """

    def __init__(self, membership: Membership, first: int, staleness: int | None) -> None:
        self.next = first  # every clock before it is agreed on
        self.agreed: dict[int, StepOrder] = {}  # the last ones
        self._membership, self._staleness = membership, staleness
        self._steps: dict[int, dict[int, Step]] = {}
        self._given: dict[int, int] = {}  # rank that left -> last clock that counts as ordered by it
        self._held: set[int] = set()  # lost ranks, until it is known which of their orders count
        self._last: dict[int, int] = {}  # asp: the newest clock that a rank ordered

    def add(self, rank: int, step: Step) -> list[tuple[int, StepOrder]]:
        """Add a rank's order; return the clocks that can be applied now and could not before.

        Raises:
            JobRefusal: two ranks differ; the user's fault.
        """
        if self._staleness is None:
            self._last[rank] = max(step.clock, self._last.get(rank, step.clock))
            self.next = min(self._last.get(one, -1) for one in self._membership.at(step.clock)) + 1
            return [(step.clock, StepOrder(step.groups, step.scale, step.save, rank))]
        if step.clock in self.agreed or step.clock < self.next - KEPT - self._staleness:
            return []  # a duplicate
        self._steps.setdefault(step.clock, {})[rank] = step
        for old in [clock for clock in self._steps if clock < step.clock - LONGEST]:
            del self._steps[old]  # of a server that leads no shard and was not reachable from some rank
        return self._settle()

    def hold_rank(self, rank: int) -> None:
        """Agree on no clock of a lost rank before `remove_rank`: what was reported to be held of it must stay true."""
        self._held.add(rank)

    def remove_rank(self, rank: int, clock: int) -> list[tuple[int, StepOrder]]:
        """Count a rank's orders up to `clock` as given, drop later ones; returns as `add`."""
        self._given[rank] = clock
        self._held.discard(rank)
        for later, steps in self._steps.items():
            if later > clock:
                steps.pop(rank, None)
        return self._settle()

    def set_members(self, membership: Membership) -> list[tuple[int, StepOrder]]:
        """Set the members from now on; returns as `add`."""
        self._membership = membership
        return self._settle()

    def missing_ranks(self, clock: int) -> list[int]:
        """Return the ranks that have not ordered `clock`."""
        if clock < self.next or clock in self.agreed or self._staleness is None:
            return []
        steps = self._steps.get(clock, {})
        ranks, given = self._membership.at(clock), self._given
        return [one for one in ranks if one in self._held or (one not in steps and given.get(one, -1) < clock)]

    def _settle(self) -> list[tuple[int, StepOrder]]:
        found: list[tuple[int, StepOrder]] = []
        for clock in sorted(self._steps):
            steps = self._steps[clock]
            if not steps:
                continue
            first = min(steps)
            for rank in sorted(steps):
                _compare(first, steps[first], rank, steps[rank])
            if self.missing_ranks(clock):
                continue
            order = StepOrder(steps[first].groups, steps[first].scale, steps[first].save)
            self.agreed[clock] = order
            found.append((clock, order))
            self.next = max(self.next, clock + 1)
        for clock, _ in found:
            del self._steps[clock]
        for clock in [known for known in self.agreed if known < self.next - KEPT - (self._staleness or 0)]:
            del self.agreed[clock]
        return found


class BackwardLedger:
    """Step orders for single shards (StepInBackward), until all members of a clock agree. bsp only.

    Nothing depends on them except time, because each shard is ordered to step by `Step` as well.

    Args:
        membership: the members of each clock.
        first: the first clock.
    """

    def __init__(self, membership: Membership, first: int) -> None:
        self.next = first  # no clock from it on is agreed on
        self._membership = membership
        self._steps: dict[int, dict[int, StepInBackward]] = {}

    def add(self, rank: int, step: StepInBackward) -> tuple[StepOrder, frozenset[int]] | None:
        """Add a rank's order; return what its clock's members have all ordered with it, and the shards that all named.

        Raises:
            JobRefusal: two ranks differ; the user's fault.
        """
        if step.clock < self.next:
            return None
        steps = self._steps.setdefault(step.clock, {})
        steps[rank] = step
        first = min(steps)
        _compare(first, _as_step(steps[first]), rank, _as_step(step))
        for old in [clock for clock in self._steps if clock < step.clock - 1]:
            del self._steps[old]
        if not steps.keys() >= set(self._membership.at(step.clock)):
            return None
        del self._steps[step.clock]
        self.next = step.clock + 1
        shards = frozenset(step.shards).intersection(*(one.shards for one in steps.values()))
        return StepOrder(step.groups, None, False), shards

    def withdraw(self) -> int:
        """Forget every order, because a worker is lost; return the first clock that none was agreed on for."""
        self._steps.clear()
        return self.next

    def set_members(self, membership: Membership) -> None:
        """Set the members from now on; what is agreed on stays."""
        self._membership = membership


def _as_step(order: StepInBackward) -> Step:
    return Step(order.clock, order.groups)


def _compare(lowest: int, first: Step, rank: int, other: Step) -> None:
    """Raise JobRefusal if a rank's order is not the lowest rank's."""
    hint = "let every rank set the same numbers: schedulers and hand-made changes must not depend on the rank"
    for index, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=True)):
        for key in sorted({*ours, *theirs}):
            if not _same(ours.get(key), theirs.get(key)):
                what = (
                    f"group {index}: {key} is {ours.get(key)!r} on worker/{lowest} "
                    f"and {theirs.get(key)!r} on worker/{rank}"
                )
                raise JobRefusal(f"optimizer {what} (clock {first.clock})", hint)
    if not _same(first.scale, other.scale):
        what = f"worker/{lowest} scales the gradient by {first.scale!r}, worker/{rank} by {other.scale!r}"
        raise JobRefusal(f"{what} (clock {first.clock})", "clip on every rank, with the same bound")


def _same(a: Number, b: Number) -> bool:
    return a == b or (a != a and b != b)  # not-a-number equals itself here
