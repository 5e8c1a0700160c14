"""What the workers read of a stream in one epoch, and the positions of its shards at a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import msgspec

from psctl.job.stream_messages import ShardPosition, ShardWanted
from psctl.types import MOST_LISTED, State

Open = tuple[ShardPosition, ...]


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch that a worker has taken."""

    batch: int
    step: int
    examples: int
    given: Open
    """Shards that the worker was given for it."""
    open: Open
    """What it had open afterwards."""


class ShardReader(msgspec.Struct):
    """What one worker reads."""

    open: Open = ()
    """Before the first record."""
    records: list[BatchRecord] = msgspec.field(default_factory=list)
    given: Open = ()
    """Shards that it was given since the last record."""
    again: Open = ()
    """Shards that an earlier incarnation was given, which this one gets in the same order."""
    next_batch: int = -1
    """The batch of its next request; -1: it has not begun to read."""
    wanted: ShardWanted | None = None
    waits: bool = False
    """It wants a shard, has no example, and there is no shard."""

    def open_at(self, step: int) -> Open:
        """Return the shards that are open when `step` steps are finished."""
        return next((each.open for each in reversed(self.records) if each.step < step), self.open)

    def held_at(self, step: int) -> Open:
        """Return those, and all shards that it was given since, at the positions at which it was."""
        later = [one for each in self.records if each.step >= step for one in each.given]
        return (*self.open_at(step), *later, *self.given, *self.again)

    def go_back(self, keep: int) -> None:
        """Forget all but the first `keep` records; what was given since is given again."""
        dropped, self.records = self.records[keep:], self.records[:keep]
        self.again = (*(one for each in dropped for one in each.given), *self.given, *self.again)
        self.given, self.wanted, self.waits = (), None, False

    def forget(self, before: int) -> None:
        """Forget the records of steps before this one."""
        while len(self.records) > 1 and self.records[1].step < before:
            self.open = self.records.pop(0).open


class OpenBatch(msgspec.Struct):
    """A batch of which some workers have not reported their examples."""

    step: int
    examples: dict[int, int] = msgspec.field(default_factory=dict)
    """By rank."""


class StreamPass(msgspec.Struct):
    """One epoch of one stream."""

    stream: int
    epoch: int
    shards: int
    names: str
    unread: list[tuple[int, int]]
    """Ranges of places that nobody reads, in order."""
    partly: list[ShardPosition] = msgspec.field(default_factory=list)
    """Shards that nobody reads, of which examples were taken; they are given first."""
    readers: dict[int, ShardReader] = msgspec.field(default_factory=dict)
    gone: set[int] = msgspec.field(default_factory=set)
    """Ranks whose shards were returned: they ask for nothing any more, also for steps of which they were members."""
    taken: dict[int, OpenBatch] = msgspec.field(default_factory=dict)
    """By number: the batches whose size is not known."""
    sizes: dict[int, int] = msgspec.field(default_factory=dict)
    """By batch: examples over all workers, of the last ones."""
    ended: int | None = None
    """The batch that there is not."""

    def take_first(self) -> ShardPosition | None:
        """Remove the shard that is to be given next, and return it."""
        if self.partly:
            return self.partly.pop(0)
        if not self.unread:
            return None
        first, stop = self.unread[0]
        self.unread[:1] = [(first + 1, stop)] if first + 1 < stop else []
        return ShardPosition(first)

    def put_back(self, shards: Iterable[ShardPosition]) -> None:
        """Return shards, for others to read."""
        for one in shards:
            if one.examples:
                insort(self.partly, one)
            else:
                self.unread = merged([*self.unread, (one.place, one.place + 1)])


def state_of(found: StreamPass, step: int, world: int) -> State:
    """Return a pass as the checkpoint of a step has it, as JSON values; `world`: workers."""
    opened = {rank: reader.open_at(step) for rank, reader in sorted(found.readers.items())}
    reading = {one.place for each in opened.values() for one in each}
    held = {one.place: one for reader in found.readers.values() for one in reader.held_at(step)}
    left = [*found.partly, *(one for place, one in sorted(held.items()) if place not in reading)]
    unread = [*found.unread, *((one.place, one.place + 1) for one in left if not one.examples)]
    return {
        "stream": found.stream, "epoch": found.epoch, "shards": found.shards, "names": found.names, "world": world,
        "open": [[rank, [[one.place, one.examples] for one in each]] for rank, each in opened.items() if each],
        "partly": [[one.place, one.examples] for one in sorted(left) if one.examples],
        "unread": [list(each) for each in merged(unread)],
    }  # fmt: skip


def restore(found: StreamPass, saved: State, world: int) -> None:
    """Continue a pass as a checkpoint has it: as many workers as then continue with the shards that they had."""
    found.unread = merged((int(first), int(stop)) for first, stop in saved["unread"])
    found.partly = [ShardPosition(*each) for each in saved["partly"]]
    for rank, every in saved["open"]:
        opened = tuple(ShardPosition(*each) for each in every)
        if saved["world"] == world:
            found.readers[rank] = ShardReader(opened)
        else:
            found.put_back(opened)


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return these ranges of places in order, with those that touch joined, and without empty ones."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif first < min(stop, MOST_LISTED + 1):
            found.append((first, stop))
    return found
