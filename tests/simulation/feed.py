"""The batches of a worker, clock by clock, in the order in which the loader draws them, without data.

The agreement on members, and the examples that return from lost ranks, are the shipped ExampleShare and
`returned_examples`.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from psctl.job.examples import clocks_in_epoch, positions
from psctl.train_state.example_sharing import Batch, ExampleShare, members_after, returned_examples
from tests.simulation.kernel import Until
from tests.simulation.model import Spec


class Place(msgspec.Struct, frozen=True):
    """Where a worker is: `within` counts the clocks of the pass that were drawn."""

    step: int
    epoch: int
    within: int
    batches: list[Batch] = []


class Feed:
    """One worker's passes over the examples, `passes` of them.

    Args:
        spec: how many examples, and how they are cut.
        division: who takes part.
        place: where it begins.
        passes: when it ends.
    """

    def __init__(self, spec: Spec, division: ExampleShare, place: Place, passes: int) -> None:
        self._spec, self._division, self._passes = spec, division, passes
        self.step, self.epoch, self.within = place.step, place.epoch, place.within
        self._batches = list(place.batches)
        self._clocks = clocks_in_epoch(spec.examples, spec.batch, spec.world)
        self.batch: Batch | None = None

    @property
    def place(self) -> Place:
        """Where it is, between two clocks."""
        return Place(self.step, self.epoch, self.within, list(self._batches))

    @property
    def pass_drawn(self) -> bool:
        """Whether all regular clocks of the pass were drawn: when all are applied, `end_pass` says what follows."""
        return self.within >= self._clocks

    def draw(self) -> Generator[Until, None, None]:
        """Make `batch` the next one."""
        yield from self._begin()
        ranges = positions(self._spec.examples, self._spec.batch, self._spec.world, self.within)
        self.batch = Batch(self.step, self.epoch, (ranges, *self._back), self._ranks)

    def end_pass(self) -> Generator[Until, None, bool]:
        """All clocks of the pass are applied: make `batch` the late one, if there is one; else the next pass begins.

        Returns whether there is one.
        """
        yield Until("what follows of the members", lambda: self._division.is_settled(None))
        yield from self._begin()
        if self._back:
            self.batch = Batch(self.step, self.epoch, self._back, self._ranks)
            return True
        self.epoch, self.within = self.epoch + 1, 0
        return False

    @property
    def over(self) -> bool:
        """Whether all passes are made."""
        return self.epoch >= self._passes

    def _begin(self) -> Generator[Until, None, None]:
        yield Until(f"who takes part in clock {self.step}", lambda: self._division.is_settled(self.step))
        changes = self._division.begin_clock(self.step)
        self._ranks = members_after(changes, range(self._spec.world))
        before = self._batches
        new = [change for change in changes if change.clock > before[-1].step] if before else []
        self._back = returned_examples(new, before, self.epoch)

    def drawn(self) -> None:
        """The batch was handed out."""
        assert self.batch is not None
        self.within += 1
        kept = [one for one in self._batches if one.step > self.batch.step - self._division.span]
        self._batches = [*kept, self.batch]

    def done(self) -> None:
        """Its clock is ordered."""
        self.step += 1
