"""The loader of a stream: batches of the examples of the shards that this worker reads.

A batch takes the worker's share of `batch_size` from its open shards, one example of each in turn. With the last
shards a worker's part of a batch becomes smaller than its share, or empty: it then yields one example, which
counts with weight 0, until all workers have run out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import default_collate

from psctl.job.examples import share
from psctl.job.stream_messages import BatchTaken, NoShardLeft, ShardPosition, ShardWanted, StreamEnded, StreamOpened
from psctl.train_state.example_sharing import parts_after
from psctl.train_state.random_generators import mix
from psctl.types import Range
from psctl.worker.loader import Example, Minibatch, check_batch
from psctl.worker.shard_requests import ShardSource
from psctl.worker.shard_stream import END, ShardCursors, ShardStream

if TYPE_CHECKING:  # that module imports this one
    from psctl.worker.training_progress import TrainingProgress


class StreamLoader:
    """An iterable of batches of a stream, made by `run.loader`. It has a `len()` where the stream has a length.

    Each `for` over it is a pass over one epoch; after a `break` the next one in the same epoch continues there.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        index: int,
        stream: ShardStream,
        batch_size: int,
        shards: ShardSource,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Example]], Minibatch] | None = None,
        per_worker: bool = False,
    ) -> None:
        self.index = index
        self.passes = 0
        """Complete passes since the epoch in which the job began or was resumed."""
        self.clock = 0
        """Batches of the current pass so far, including those before a resume."""
        self.examples = 0
        """Examples of the current batch that count; 0: this worker only takes part in the step."""
        self.complete = False
        """Whether the current pass has no more batches."""
        self._progress, self._stream, self._shards = progress, stream, shards
        self._shuffle, self._workers, self._collate = shuffle, num_workers, collate_fn or default_collate
        self._batch = batch_size * progress.world if per_worker else batch_size
        check_batch(self._batch, batch_size, progress.world)
        self._epoch: int | None = None
        self._last_pass: int | None = None  # its batches
        self._sample: Example = END  # for batches without an example
        self._dry = False  # no shard was left when one was wanted

    @property
    def batches(self) -> int | None:
        """Batches an epoch, as the last one or the stream's length has it; None: unknown."""
        if self._last_pass is not None or self._stream.length is None:
            return self._last_pass
        return math.ceil(self._stream.length / self._batch)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("the length of this stream is not known yet: run.stream(..., length=examples) tells it")
        return self.batches

    def __iter__(self) -> Iterator[Minibatch]:
        self._progress.on_batch_wanted(self)
        epoch, start = self._progress.epoch_of(self)
        if epoch != self._epoch:
            self._epoch, self.clock, self._dry, self.complete = epoch, start, False, False
        return self._run(epoch)

    def _run(self, epoch: int) -> Iterator[Minibatch]:
        progress = self._progress
        seeds = (progress.seed, "example", epoch)
        cursors = ShardCursors(
            self._stream, self._order(epoch), seeds,
            processes=self._workers > 0, part=max(1, self._batch // progress.world),
        )  # fmt: skip
        opened = False
        try:
            spans = progress.spans
            while True:
                began = spans.now()
                step, changes, ranks = progress.begin_clock()
                progress.generators.begin_step()  # it includes the fetch
                if not opened:
                    self._open(cursors, step)
                    opened = True
                at, parts = ranks.index(progress.rank), parts_after(changes)
                size = len(share(Range(0, self._batch), len(ranks), at, parts))
                found = self._take(cursors, step, size)
                if found is None:
                    break
                own, total = len(found), self._report(cursors, step, len(found))
                batch = self._collate(found or [self._sample])
                self.clock, self.examples = self.clock + 1, own
                spans.loaded(began)
                progress.on_batch(self, own, total)
                yield batch
                progress.on_batch_wanted(self)
            self.complete, self._last_pass = True, self.clock
            progress.on_exhausted(self)
        finally:
            cursors.close()
            progress.generators.end_step()  # of an abandoned pass, too

    def _open(self, cursors: ShardCursors, step: int) -> None:
        stream = self._stream
        opened = StreamOpened(self.index, self._at, self.clock, step, len(stream.shards), stream.names())
        for shard in self._shards.open(opened).open:
            cursors.open(shard)

    @property
    def _at(self) -> int:
        assert self._epoch is not None, "a pass has begun"
        return self._epoch

    def _take(self, cursors: ShardCursors, step: int, size: int) -> list[Example] | None:
        """Return this worker's examples of the next batch, at most `size`; None at the end of the epoch."""
        examples: list[Example] = []
        while len(examples) < size:
            in_hand = len(examples) + len(cursors)
            if (len(cursors) < max(1, self._workers) and not self._dry) or not in_hand:
                answer = self._want(step, in_hand)
                if isinstance(answer, StreamEnded):
                    return None
                if isinstance(answer, ShardPosition):
                    cursors.open(answer)
                    continue
                self._dry = True
                if not in_hand:
                    self._find_sample(cursors)
                    break
            if not cursors:
                break
            examples.append(cursors.take())
        if examples:
            self._sample = examples[0]
        return examples

    def _want(self, step: int, in_hand: int) -> ShardPosition | NoShardLeft | StreamEnded:
        if not in_hand:
            self._progress.settle()  # what this worker has done is sure to count when it says that it has nothing
        return self._shards.want(ShardWanted(self.index, self._at, self.clock, step, in_hand))

    def _find_sample(self, cursors: ShardCursors) -> None:
        if self._sample is END:
            self._sample = cursors.first_example()

    def _report(self, cursors: ShardCursors, step: int, examples: int) -> int | Callable[[], int]:
        """Report a batch; return its examples over all workers, or a function that waits for them."""
        taken = BatchTaken(self.index, self._at, self.clock, step, examples, cursors.positions)
        size = self._shards.take(taken)
        return size if self._shards.sized else self._batch

    def _order(self, epoch: int) -> Sequence[int]:
        count = len(self._stream.shards)
        if not self._shuffle:
            return range(count)
        generator = torch.Generator().manual_seed(mix(self._progress.seed, "order", epoch))
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order
