"""The loader of a run: its batches depend on seed, epoch and clock alone, and ranks share them in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from psctl.errors import UsageError
from psctl.job.examples import clocks_in_epoch, positions
from psctl.train_state.example_sharing import Batch, parts_after, returned_examples
from psctl.train_state.random_generators import GeneratorStates, mix, reseed
from psctl.types import Range

if TYPE_CHECKING:  # that module imports this one
    from psctl.worker.training_progress import TrainingProgress

Example: TypeAlias = Any
"""An example of the user's dataset. Any: only the script looks into it."""

Minibatch: TypeAlias = Any
"""What the user's `collate_fn` makes of a list of examples. Any: as Example."""


class Loader:
    """An iterable of batches, made by `run.loader`. `len()` is the number of batches an epoch, the same on every rank.

    Each `for` over it is one pass over one epoch's order.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        index: int,
        dataset: Dataset[Example],
        batch_size: int,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Example]], Minibatch] | None = None,
        per_worker: bool = False,
        on_next: Callable[[Minibatch], None] | None = None,
    ) -> None:
        self.index = index
        self.passes = 0
        """Complete passes since the epoch in which the job began or was resumed."""
        self.clock = 0
        """Batches of the current pass so far, including those before a resume."""
        self._progress, self._dataset = progress, dataset
        self._shuffle, self._workers, self._collate = shuffle, num_workers, collate_fn or default_collate
        self._examples = _length(dataset)
        self._batch = batch_size * progress.world if per_worker else batch_size
        check_batch(self._batch, batch_size, progress.world)
        _check_examples(self._examples, progress.world)
        self._clocks = clocks_in_epoch(self._examples, self._batch, progress.world)
        self._on_next = on_next  # called with the next batch before each batch is yielded
        self._late = False  # one more batch follows, of examples that a lost rank had drawn

    def __len__(self) -> int:
        return self._clocks

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return self._clocks

    @property
    def complete(self) -> bool:
        """Whether the current pass has no more batches."""
        return self.clock >= self._clocks and not self._late

    def __iter__(self) -> Iterator[Minibatch]:
        self._progress.on_batch_wanted(self)
        epoch, start = self._progress.epoch_of(self)
        return self._run(epoch, start)

    def _run(self, epoch: int, start: int) -> Iterator[Minibatch]:
        self.clock = start
        fetching: Iterator[Minibatch] | None = None
        early: FetchedBatch | None = None
        sharing: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # the ranks and their parts
        try:
            spans = self._progress.spans
            while (batch := self._next(epoch)) is not None:
                began = spans.now()
                self._progress.generators.begin_step()  # it includes the fetch
                if fetching is None or len(batch.ranges) > 1 or (batch.ranks, batch.parts) != sharing:
                    fetching, sharing, early = iter(self._fetching(batch)), (batch.ranks, batch.parts), None
                found = early.take() if early is not None else next(fetching)
                self.clock, self._late = self.clock + 1, False
                self._progress.remember_batch(self, batch)
                early = self._fetch_next(fetching, batch) if self._on_next is not None else None
                spans.loaded(began)
                self._progress.on_batch(self, sum(map(len, batch.of(self._progress.rank))), batch.size)
                yield found
                self._progress.on_batch_wanted(self)
            self._progress.on_exhausted(self)
        finally:
            self._progress.generators.end_step()  # of an abandoned pass, too

    def _fetch_next(self, fetching: Iterator[Minibatch], batch: Batch) -> FetchedBatch | None:
        """Fetch the next clock's batch of this pass and report it; None at the end of the pass.

        The generators are as if it had not been fetched, until it is its turn.
        """
        assert self._on_next is not None, "checked by the caller"
        if self.clock >= self._clocks or not batch.of(self._progress.rank):
            return None
        if self._workers:  # they draw the numbers of the fetch
            fetched = FetchedBatch(next(fetching))
        else:
            before = GeneratorStates.now()
            fetched = FetchedBatch(next(fetching), GeneratorStates.now())
            before.apply()
        self._on_next(fetched.batch)
        return fetched

    def _next(self, epoch: int) -> Batch | None:
        """Return the next clock's batch of all ranks; None at the end of the pass."""
        if self.clock >= self._clocks and not self._progress.may_extend_pass():
            return None
        step, changes, ranks = self._progress.begin_clock()
        before = self._progress.recent_batches(self)
        new = [change for change in changes if change.clock > before[-1].step] if before else []
        back = returned_examples(new, before, epoch)
        parts = parts_after(changes)
        if self.clock < self._clocks:
            return Batch(step, epoch, (self._positions(self.clock), *back), ranks, parts)
        if not back:
            return None
        self._late = True
        self._progress.on_batch_wanted(self)
        return Batch(step, epoch, back, ranks, parts)

    def _positions(self, clock: int) -> Range:
        return positions(self._examples, self._batch, self._progress.world, clock)

    def _fetching(self, first: Batch) -> DataLoader[Minibatch]:
        """Return a fetcher of this batch and, for the same ranks, those of later clocks."""
        epoch, rank, seed = first.epoch, self._progress.rank, self._progress.seed
        later = range(self.clock + 1, self._clocks)
        takes = {self.clock: first} | {
            clock: Batch(0, epoch, (self._positions(clock),), first.ranks, first.parts) for clock in later
        }  # fmt: skip
        clocks = EpochBatches(
            self._dataset, self._collate, self._order(epoch), (seed, epoch, rank),
            {clock: [(one.start, one.stop) for one in _share_of(batch, rank)] for clock, batch in takes.items()},
        )  # fmt: skip
        # A generator of its own seeds the loader processes, so that a pass does not draw from the script's.
        return DataLoader(
            clocks, batch_size=None, sampler=list(takes), num_workers=self._workers,
            collate_fn=return_batch, generator=torch.Generator().manual_seed(mix(seed, "loader", epoch)),
        )  # fmt: skip

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        generator = torch.Generator().manual_seed(mix(self._progress.seed, "order", epoch))
        return torch.randperm(self._examples, generator=generator)


class FetchedBatch(NamedTuple):
    """A batch that was fetched before its clock, and the generators' states after the fetch (None: it drew nothing)."""

    batch: Minibatch
    generators: GeneratorStates | None = None

    def take(self) -> Minibatch:
        """Return the batch in its clock."""
        if self.generators is not None:
            self.generators.apply()
        return self.batch


class EpochBatches(Dataset[Minibatch]):
    """One rank's batches of an epoch, by clock; runs in loader processes too, each batch under a seed of its own."""

    def __init__(
        self,
        dataset: Dataset[Example],
        collate: Callable[[list[Example]], Minibatch],
        order: torch.Tensor | None,
        seeds: tuple[int, int, int],
        ranges: dict[int, list[tuple[int, int]]],
    ) -> None:
        self._dataset, self._collate, self._order, self._seeds, self._ranges = dataset, collate, order, seeds, ranges

    def __getitem__(self, clock: int) -> Minibatch:
        seed, epoch, rank = self._seeds
        reseed(seed, "fetch", epoch, clock, rank)
        indices = [index for start, stop in self._ranges[clock] for index in range(start, stop)]
        if self._order is not None:
            indices = self._order[indices].tolist()
        fetch_all = getattr(self._dataset, "__getitems__", None)
        items = fetch_all(indices) if fetch_all is not None else [self._dataset[index] for index in indices]
        return self._collate(items)


def _share_of(batch: Batch, rank: int) -> tuple[Range, ...]:
    """Return a rank's share of a batch; one example of another rank, with weight 0, where it has none."""
    return batch.of(rank) or (Range(batch.ranges[0].start, batch.ranges[0].start + 1),)


def return_batch(batch: Minibatch) -> Minibatch:
    """Return the batch unchanged; it is collated already."""
    return batch


def _length(dataset: Dataset[Example]) -> int:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"run.loader: {type(dataset).__name__} is an IterableDataset: its examples have no positions, so "
            "neither a rank's share nor a position in an epoch is defined",
            "give it a run.stream(shards, open_shard), where open_shard(shard) returns the examples of a part of the "
            "data, such as a file; or use a DataLoader of your own (ranks then count equally)",
        )
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(
            f"run.loader: {type(dataset).__name__} has no length", "give a dataset with __len__ and __getitem__"
        ) from error


def check_batch(batch: int, given: int, world: int) -> None:
    """Refuse a batch of which some worker would have no example.

    Args:
        batch: examples of a step, over all workers.
        given: `batch_size` of the call.
        world: number of workers.

    Raises:
        UsageError: the script's fault; it names the argument.
    """
    if given < 1:
        raise UsageError(
            f"run.loader: batch_size is {given}, expected 1 or more",
            "give the number of examples that all workers consume in a step",
        )
    if batch < world:
        raise UsageError(
            f"run.loader: batch_size {batch} is divided among {world} workers in each step: some would have no example",
            f"give batch_size={world} or more, or per_worker=True",
        )


def _check_examples(examples: int, world: int) -> None:
    if examples < world:
        raise UsageError(
            f"run.loader: the dataset has {examples} examples, fewer than the {world} workers",
            "use fewer workers: --workers",
        )
