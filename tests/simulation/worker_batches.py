"""The batches of a worker in the order of the loader, without data.

Members and returned examples come from the shipped ExampleShare and `returned_examples`.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from psctl.job.examples import clocks_in_epoch, positions
from psctl.train_state.example_sharing import Batch, ExampleShare, members_after, returned_examples
from tests.simulation.kernel import Until
from tests.simulation.model import Spec


class LoaderPosition(msgspec.Struct, frozen=True):
    """A position of the loader. `clock_in_epoch` counts the drawn clocks of the epoch."""

    step: int
    epoch: int
    clock_in_epoch: int
    batches: list[Batch] = []


class WorkerBatches:
    """The batches of one worker for a number of epochs.

    Args:
        spec: the number of examples and the batch size.
        world: the number of workers at the start.
        example_share: the members by clock.
        position: the first position.
        epochs: the number of epochs.
    """

    def __init__(
        self, spec: Spec, world: int, example_share: ExampleShare, position: LoaderPosition, epochs: int
    ) -> None:
        self._spec, self._world, self._example_share, self._epochs = spec, world, example_share, epochs
        self.step, self.epoch, self.clock_in_epoch = position.step, position.epoch, position.clock_in_epoch
        self._batches = list(position.batches)
        self._clocks = clocks_in_epoch(spec.examples, spec.batch, world)
        self.batch: Batch | None = None
        self._ranks = tuple(range(world))

    @property
    def position(self) -> LoaderPosition:
        """The position between two clocks."""
        return LoaderPosition(self.step, self.epoch, self.clock_in_epoch, list(self._batches))

    @property
    def epoch_drawn(self) -> bool:
        """Whether all regular clocks of the epoch are drawn; `end_epoch` follows when they are applied."""
        return self.clock_in_epoch >= self._clocks

    def draw(self) -> Generator[Until, None, None]:
        """Draw the next batch into `batch`."""
        yield from self._begin_clock()
        ranges = positions(self._spec.examples, self._spec.batch, self._world, self.clock_in_epoch)
        self.batch = Batch(self.step, self.epoch, (ranges, *self._returned), self._ranks)

    def end_epoch(self) -> Generator[Until, None, bool]:
        """Draw the batch of returned examples, or begin the next epoch; all clocks of this one are applied.

        Returns whether there is such a batch.
        """
        if self._example_share.elastic:
            yield Until("what follows of the members", lambda: self._example_share.is_settled(None))
            yield from self._begin_clock()
        if self._example_share.elastic and self._returned:
            self.batch = Batch(self.step, self.epoch, self._returned, self._ranks)
            return True
        self.epoch, self.clock_in_epoch = self.epoch + 1, 0
        return False

    def leaves(self, rank: int) -> bool:
        """Whether a rank is no member of the clock that was begun."""
        return rank not in self._ranks

    @property
    def finished(self) -> bool:
        """Whether all epochs are drawn."""
        return self.epoch >= self._epochs

    def _begin_clock(self) -> Generator[Until, None, None]:
        yield Until(f"the members of clock {self.step}", lambda: self._example_share.is_settled(self.step))
        changes = self._example_share.begin_clock(self.step)
        self._ranks = members_after(changes, range(self._world))
        drawn = self._batches
        new = [change for change in changes if change.clock > drawn[-1].step] if drawn else []
        self._returned = returned_examples(new, drawn, self.epoch)

    def commit_batch(self) -> None:
        """Record the batch as drawn."""
        assert self.batch is not None
        self.clock_in_epoch += 1
        kept = [one for one in self._batches if one.step > self.batch.step - self._example_share.span]
        self._batches = [*kept, self.batch]

    def advance_step(self) -> None:
        """Continue with the next step."""
        self.step += 1
