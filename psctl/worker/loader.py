"""Batches whose examples are a function of seed, epoch and clock alone, shared by the ranks in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from psctl.errors import UsageError
from psctl.job.examples import clocks_in_epoch, positions
from psctl.job.membership_messages import ExamplesShared
from psctl.train_state.example_sharing import Batch, owed
from psctl.train_state.step_seed import mix, reseed
from psctl.types import Range


class Consumer(Protocol):
    """The run that a loader's batches feed."""

    rank: int
    world: int
    seed: int

    def wanted(self, loader: Loader) -> None:
        """The loop asks for the next batch: what was done before is complete."""

    def begin_clock(self) -> tuple[int, list[ExamplesShared], tuple[int, ...]]:
        """Begin the clock of the next batch: return it, all changes of members up to it, and who shares it."""

    def batches(self, loader: Loader) -> list[Batch]:
        """Return the last batches of a loader, where members may change."""

    def remember(self, loader: Loader, batch: Batch) -> None:
        """Note what a loader hands out."""

    def pass_ends(self) -> bool:
        """The last batch of a pass was handed out: tell whether a change of members may add one, when it is known."""

    def fetching(self) -> None:
        """A batch is about to be fetched."""

    def passed(self) -> None:
        """A pass has ended, or was left."""

    def drawn(self, loader: Loader, mine: int, together: int) -> None:
        """A batch of `mine` examples, of `together` over all ranks, is handed out."""

    def epoch_of(self, loader: Loader) -> tuple[int, int]:
        """Return the epoch that a new pass over this loader belongs to, and the clock to begin at."""

    def exhausted(self, loader: Loader) -> None:
        """A pass over the loader has ended."""


class Loader:
    """An iterable of batches, made by `run.loader`. `len()` is the number of batches an epoch, the same on every rank.

    Each `for` over it is one pass over one epoch's order.
    """

    def __init__(
        self,
        consumer: Consumer,
        index: int,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        per_worker: bool = False,
    ) -> None:
        self.index = index
        self.passes = 0
        """How often it was exhausted, counted from the epoch that the job went on from."""
        self.clock = 0
        """Batches handed out of the pass that goes on, those before a resume included."""
        self._consumer, self._dataset = consumer, dataset
        self._shuffle, self._workers, self._collate = shuffle, num_workers, collate_fn or default_collate
        self._examples = _length(dataset)
        self._batch = batch_size * consumer.world if per_worker else batch_size
        _check(self._examples, self._batch, batch_size, consumer.world)
        self._clocks = clocks_in_epoch(self._examples, self._batch, consumer.world)
        self._late = False  # one more batch comes, of what a lost rank had drawn

    def __len__(self) -> int:
        return self._clocks

    @property
    def complete(self) -> bool:
        """Every batch of the pass that goes on was handed out."""
        return self.clock >= self._clocks and not self._late

    def __iter__(self) -> Iterator[Any]:
        self._consumer.wanted(self)
        epoch, start = self._consumer.epoch_of(self)
        return self._run(epoch, start)

    def _run(self, epoch: int, start: int) -> Iterator[Any]:
        self.clock = start
        fetching: Iterator[Any] | None = None
        ranks: tuple[int, ...] = ()
        try:
            while (batch := self._next(epoch)) is not None:
                self._consumer.fetching()
                if fetching is None or len(batch.ranges) > 1 or batch.ranks != ranks:
                    fetching, ranks = iter(self._fetching(batch)), batch.ranks
                found = next(fetching)
                self.clock, self._late = self.clock + 1, False
                self._consumer.remember(self, batch)
                self._consumer.drawn(self, sum(map(len, batch.of(self._consumer.rank))), batch.size)
                yield found
                self._consumer.wanted(self)
            self._consumer.exhausted(self)
        finally:
            self._consumer.passed()

    def _next(self, epoch: int) -> Batch | None:
        """Return what all ranks take at the next clock; None at the end of the pass."""
        if self.clock >= self._clocks and not self._consumer.pass_ends():
            return None
        step, changes, ranks = self._consumer.begin_clock()
        before = self._consumer.batches(self)
        new = [change for change in changes if change.clock > before[-1].step] if before else []
        back = owed(new, before, epoch)
        if self.clock < self._clocks:
            return Batch(step, epoch, (self._positions(self.clock), *back), ranks)
        if not back:
            return None
        self._late = True
        self._consumer.wanted(self)
        return Batch(step, epoch, back, ranks)

    def _positions(self, clock: int) -> Range:
        return positions(self._examples, self._batch, self._consumer.world, clock)

    def _fetching(self, first: Batch) -> DataLoader[Any]:
        """Fetch this batch and, for the same ranks, those of the clocks after it."""
        epoch, rank, seed = first.epoch, self._consumer.rank, self._consumer.seed
        later = range(self.clock + 1, self._clocks)
        takes = {self.clock: first} | {
            clock: Batch(0, epoch, (self._positions(clock),), first.ranks) for clock in later
        }  # fmt: skip
        clocks = EpochBatches(
            self._dataset, self._collate, self._order(epoch), (seed, epoch, rank),
            {clock: [(one.start, one.stop) for one in _some(batch, rank)] for clock, batch in takes.items()},
        )  # fmt: skip
        # The base seed of loader processes comes from a generator of its own, so that a pass leaves the script's alone.
        return DataLoader(
            clocks, batch_size=None, sampler=list(takes), num_workers=self._workers,
            collate_fn=as_it_is, generator=torch.Generator().manual_seed(mix(seed, "loader", epoch)),
        )  # fmt: skip

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        generator = torch.Generator().manual_seed(mix(self._consumer.seed, "order", epoch))
        return torch.randperm(self._examples, generator=generator)


class EpochBatches(Dataset[Any]):
    """One rank's batches of an epoch, by clock; runs in loader processes too, each batch under a seed of its own."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        order: torch.Tensor | None,
        seeds: tuple[int, int, int],
        ranges: dict[int, list[tuple[int, int]]],
    ) -> None:
        self._dataset, self._collate, self._order, self._seeds, self._ranges = dataset, collate, order, seeds, ranges

    def __getitem__(self, clock: int) -> Any:
        seed, epoch, rank = self._seeds
        reseed(seed, "fetch", epoch, clock, rank)
        places = [place for start, stop in self._ranges[clock] for place in range(start, stop)]
        if self._order is not None:
            places = self._order[places].tolist()
        together = getattr(self._dataset, "__getitems__", None)
        items = together(places) if together is not None else [self._dataset[place] for place in places]
        return self._collate(items)


def _some(batch: Batch, rank: int) -> tuple[Range, ...]:
    """Return a rank's share of a batch; where there are fewer examples than ranks, one that others count."""
    return batch.of(rank) or (Range(batch.ranges[0].start, batch.ranges[0].start + 1),)


def as_it_is(batch: Any) -> Any:
    """Return what the clock made; it is collated already."""
    return batch


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"run.loader: {type(dataset).__name__} is an IterableDataset: it has no positions, so nobody can say which "
            "rank takes which example, nor where to go on",
            "give a dataset with __len__ and __getitem__, or use a DataLoader of your own (ranks then count equally)",
        )
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(
            f"run.loader: {type(dataset).__name__} has no length", "give a dataset with __len__ and __getitem__"
        ) from error


def _check(examples: int, batch: int, given: int, world: int) -> None:
    if given < 1:
        raise UsageError(f"run.loader: batch_size is {given}, expected 1 or more", "it counts examples")
    if batch < world:
        raise UsageError(
            f"run.loader: batch_size {batch} is what all {world} workers share in a step: somebody would have none",
            f"give batch_size={world} or more, or per_worker=True",
        )
    if examples < world:
        raise UsageError(
            f"run.loader: the dataset has {examples} examples for {world} workers", "use fewer workers: --workers"
        )
