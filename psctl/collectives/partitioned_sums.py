"""Sums whose parts stay with their owners, and gathers of the owners' values: the two halves of an all-reduce.

Between a reduce-scatter and the all-gather after it each rank may change the chunks that it owns: an optimizer that is
sharded over the ranks steps there (ZeRO: Rajbhandari and others, SC 2020). Both halves together move the bytes of the
all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist

from psctl.collectives.allreduce_backends import (
    UNKNOWN_PEER,
    AllReduceBackend,
    EngineAllReduce,
    PendingSum,
    ScheduleAllReduce,
)
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.schedule.algorithms.split import SplitAllReduce
from psctl.types import PeerBytes

ChunkRanges = tuple[tuple[int, int], ...]
"""From which element to which each chunk of a vector is."""


class PartitionBackend(Protocol):
    """Sums the chunks of vectors at their owners, and gathers them from there; all ranks in the same order."""

    world: int
    me: int
    """This rank."""
    owners: tuple[int, ...]
    """The rank of each chunk."""
    shares: tuple[int, ...]
    """Relative size of each chunk."""
    equal: bool
    """Whether all chunks of a vector must have the same length."""

    @property
    def sums(self) -> AllReduceBackend:
        """Sums short vectors for all ranks, in turn with these; it makes the vectors."""

    def reduce(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        """Begin to sum a vector: afterwards this rank's chunks have the sums, others have anything."""

    def gather(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        """Begin to copy each chunk from its owner to all ranks; it needs no thread that waits for it."""

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        """Bytes sent to and received from each process so far."""


class EnginePartition:
    """The engine's own reduce-scatter and all-gather.

    Args:
        group: the engine's.
    """

    equal = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sums: AllReduceBackend = EngineAllReduce(group)
        self.world, self.me = self.sums.world, dist.get_rank(group)
        self.owners, self.shares = tuple(range(self.world)), (1,) * self.world
        self._reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        self._all_gather = _named("all_gather_single", "all_gather_into_tensor")
        self._sent = 0

    def reduce(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        self._count(vector)
        return self._reduce_scatter(self._own(vector, ranges), vector, group=self._group, async_op=True)

    def gather(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        self._count(vector)
        return self._all_gather(vector, self._own(vector, ranges), group=self._group, async_op=True)

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        both = self.sums.bytes_by_peer[UNKNOWN_PEER].sent + self._sent
        return {UNKNOWN_PEER: PeerBytes(both, both)}

    def _own(self, vector: torch.Tensor, ranges: ChunkRanges) -> torch.Tensor:
        start, stop = ranges[self.me]
        return vector[start:stop]

    def _count(self, vector: torch.Tensor) -> None:
        self._sent += vector.nbytes * (self.world - 1) // self.world


def _named(new: str, old: str) -> Callable[..., PendingSum]:
    """Return a function of torch.distributed, which older versions have by another name."""
    return cast(Callable[..., PendingSum], getattr(dist, new, None) or getattr(dist, old))


class SchedulePartition:
    """The halves of a schedule, played over the connections of its all-reduce.

    Args:
        sums: plays the schedule.
        halves: of the same schedule.
    """

    equal = False

    def __init__(self, sums: ScheduleAllReduce, halves: SplitAllReduce) -> None:
        self.sums: AllReduceBackend = sums
        self._played = sums
        self.world, self.me = sums.world, sums.rank
        self.owners, self.shares = halves.owners, halves.reduce_scatter.shares
        self._adding, self._copying = sums.part_player(halves.reduce_scatter), sums.part_player(halves.all_gather)
        self._cuts: dict[ChunkRanges, VectorChunks] = {}

    def reduce(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        return self._played.put_play(self._adding, self._cut(ranges), vector, at_once=False)

    def gather(self, vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        # At once: a rank may wait for values that another, in a wait outside of training, would not play.
        return self._played.put_play(self._copying, self._cut(ranges), vector, at_once=True)

    def gather_after(self, step: Callable[[], object], vector: torch.Tensor, ranges: ChunkRanges) -> PendingSum:
        """Begin to gather a vector whose chunks `step` writes, when every sum that was begun before has ended."""
        return self._played.put_play(self._copying, self._cut(ranges), vector, at_once=True, before=step)

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self.sums.bytes_by_peer

    def _cut(self, ranges: ChunkRanges) -> VectorChunks:
        if ranges not in self._cuts:
            self._cuts[ranges] = VectorChunks(ranges)
        return self._cuts[ranges]


def by_rank(backend: PartitionBackend, number: float, device: torch.device) -> list[float]:
    """Return each rank's number, in float64; `device`: where vectors are summed."""
    found = torch.zeros(backend.world, dtype=torch.float64, device=device)
    found[backend.me] = number
    backend.sums.put(found).wait()
    return [float(each) for each in found.tolist()]
