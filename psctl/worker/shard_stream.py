"""Streams: an IterableDataset made of shards, and the readers of the shards that a worker has open."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from psctl.errors import UsageError
from psctl.job.stream_messages import ShardPosition
from psctl.train_state.random_generators import mix, reseed
from psctl.worker.loader import Example, return_batch

Shard: TypeAlias = Any
"""A shard's name or description. Any: only the script's `open_shard` looks into it."""

OpenShard = Callable[[Shard], Iterable[Example]]

MOST_PART = 64
"""Most examples that a loader process sends at once."""

END = object()
"""Stands for the end of a shard."""


class ShardStream(IterableDataset[Example]):
    """A list of shards, made by `run.stream`. `run.loader` shares them among the workers.

    Iterated by itself, or by a DataLoader of torch, it gives all examples of all shards in order: for an evaluation.
    """

    def __init__(self, shards: Iterable[Shard], open_shard: OpenShard, length: int | None = None) -> None:
        if isinstance(shards, str | bytes):
            raise UsageError(
                f"run.stream: shards is {shards!r:.60}, one text",
                "give a list: run.stream(sorted(glob(...)), open_shard)",
            )
        self.shards: Sequence[Shard] = list(shards)
        """What `open_shard` is called with."""
        self.open_shard: OpenShard = open_shard
        """Returns the examples of a shard."""
        self.length = length
        """Examples of all shards; None: unknown."""
        if not self.shards:
            raise UsageError(
                "run.stream: the list of shards is empty", "check the pattern or the folder that it is from"
            )
        if not callable(open_shard):
            raise UsageError(
                f"run.stream: open_shard is {type(open_shard).__name__}, expected a function",
                "give a function that returns the examples of a shard",
            )
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise UsageError(
                f"run.stream(length={length!r:.40}): expected examples an epoch, 1 or more", "or leave it out"
            )

    def __iter__(self) -> Iterator[Example]:
        info = get_worker_info()
        first, count = (info.id, info.num_workers) if info is not None else (0, 1)
        for shard in self.shards[first::count]:
            yield from self.open_shard(shard)

    def names(self) -> str:
        """Return a digest of the shards' names, without folders, which differ by host; "" where they have no names."""
        found = []
        for shard in self.shards:
            if isinstance(shard, os.PathLike | str):
                found.append(os.path.basename(os.fsdecode(shard)))
            elif isinstance(shard, int):
                found.append(str(shard))
            else:
                return ""
        return hashlib.sha256("\0".join(found).encode("utf-8", "surrogateescape")).hexdigest()


def seeded_examples(open_shard: OpenShard, shard: Shard, skip: int, seeds: tuple[int | str, ...]) -> Iterator[Example]:
    """Yield the examples of a shard from number `skip` on, each made under a seed of its own."""
    reseed(*seeds, 0)
    examples = iter(open_shard(shard))
    at = 0
    while True:
        reseed(*seeds, at)
        example = next(examples, END)
        if example is END:
            return
        if at >= skip:
            yield example
        at += 1


class ShardParts(IterableDataset[list[Example]]):
    """The examples of one shard in lists; runs in a loader process."""

    def __init__(self, open_shard: OpenShard, shard: Shard, skip: int, seeds: tuple[int | str, ...], size: int) -> None:
        self._given = open_shard, shard, skip, seeds
        self._size = size

    def __iter__(self) -> Iterator[list[Example]]:
        part: list[Example] = []
        for example in seeded_examples(*self._given):
            part.append(example)
            if len(part) == self._size:
                yield part
                part = []
        if part:
            yield part


class ShardCursor:
    """The next examples of one open shard."""

    def __init__(self, place: int, taken: int, examples: Iterator[Example]) -> None:
        self.place, self.taken = place, taken
        self._examples = examples
        self._next = next(examples, END)

    @property
    def at_end(self) -> bool:
        """Whether it has no more examples."""
        return self._next is END

    def take(self) -> Example:
        """Return the next example."""
        found, self._next = self._next, next(self._examples, END)
        self.taken += 1
        return found


class ShardCursors:
    """The shards that a worker has open, of which it takes examples in turn.

    Args:
        stream: the stream.
        order: the number of the shard at each place of the epoch's order.
        seeds: of random numbers, in addition to shard and position.
        processes: whether each shard is read by a process of its own.
        part: examples that such a process sends at once.
    """

    def __init__(
        self, stream: ShardStream, order: Sequence[int], seeds: tuple[int | str, ...], *, processes: bool, part: int
    ) -> None:
        self._stream, self._order, self._seeds = stream, order, seeds
        self._processes, self._part = processes, min(part, MOST_PART)
        self._open: deque[ShardCursor] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def positions(self) -> tuple[ShardPosition, ...]:
        """The open shards, in the order of their turns."""
        return tuple(ShardPosition(each.place, each.taken) for each in self._open)

    def open(self, shard: ShardPosition) -> None:
        """Open a shard; one without further examples is closed at once."""
        cursor = ShardCursor(shard.place, shard.examples, self._examples(shard))
        if not cursor.at_end:
            self._open.append(cursor)

    def take(self) -> Example:
        """Return the next example, of the shard whose turn it is."""
        cursor = self._open.popleft()
        found = cursor.take()
        if not cursor.at_end:
            self._open.append(cursor)
        return found

    def first_example(self) -> Example:
        """Return an example of the stream, or END where all shards are empty; no position changes."""
        for shard in self._stream.shards:
            for example in self._stream.open_shard(shard):
                return example
        return END

    def close(self) -> None:
        """Close all shards; loader processes end."""
        self._open.clear()

    def _examples(self, shard: ShardPosition) -> Iterator[Example]:
        number = self._order[shard.place]
        seeds = (*self._seeds, number)
        given = self._stream.open_shard, self._stream.shards[number], shard.examples, seeds
        if not self._processes:
            return seeded_examples(*given)
        parts = DataLoader(
            ShardParts(*given, self._part), batch_size=None, num_workers=1, collate_fn=return_batch,
            generator=Generator().manual_seed(mix(*seeds, "loader")),
        )  # fmt: skip
        return (example for part in parts for example in part)
