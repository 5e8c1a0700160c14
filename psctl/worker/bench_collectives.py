"""The collectives that `psctl bench broadcast|...` measures: the engine's own, or a schedule that is played.

A vector has the bytes that nccl-tests count: the whole that the root or each rank has in the end, or had first; in an
all-to-all what one rank has for all. Values are whole numbers by rank and place, so a result is right exactly or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec
import torch
import torch.distributed as dist

from psctl.collectives.channel import BatchChannel, Channel, EngineChannel
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.player import SchedulePlayer
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.schedule.algorithms import collectives
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.contracts import Collective
from psctl.worker import bench_patterns

ROOT = 0
"""The rank that gives or gets the whole."""


class CollectiveValues:
    """What each rank has at first, and must have at the end, in the vector of a collective.

    Args:
        collective: its name.
        rank: this rank.
        world: number of ranks.
        length: elements of the vector; in an all-to-all of what one rank has for all.
    """

    def __init__(self, collective: Collective, rank: int, world: int, length: int) -> None:
        self._collective, self._rank, self._world = collective, rank, world
        self._length = length * world if collective == "all-to-all" else length

    @property
    def length(self) -> int:
        """Elements of the vector."""
        return self._length

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """From which element to which each rank's part is; of an all-to-all each pair's."""
        if self._collective in ("broadcast", "reduce"):
            return [(0, self._length)]
        count = self._world**2 if self._collective == "all-to-all" else self._world
        ends = [self._length * at // count for at in range(count + 1)]
        return list(pairwise(ends))

    def mine(self) -> torch.Tensor:
        """Return this rank's vector; what it does not have is -1."""
        own = bench_patterns.repeat_block(bench_patterns.whole(self._rank), self._length)
        if self._collective in ("reduce", "reduce-scatter"):
            return own
        found = torch.full_like(own, -1.0)
        for low, high in self._held():
            found[low:high] = own[low:high]
        return found

    def _held(self) -> list[tuple[int, int]]:
        if self._collective in ("broadcast", "scatter"):
            return [(0, self._length)] if self._rank == ROOT else []
        if self._collective == "all-to-all":
            return self.chunks[self._rank * self._world : (self._rank + 1) * self._world]
        return [self.chunks[self._rank]]

    def is_right(self, found: torch.Tensor) -> bool:
        """Whether this rank's vector is what it must be at the end."""
        chunks, world = self.chunks, self._world
        if self._collective == "reduce":
            return self._rank != ROOT or bench_patterns.exact(found, world)
        if self._collective == "reduce-scatter":
            total = sum((bench_patterns.whole(rank) for rank in range(world)), torch.zeros(bench_patterns.BLOCK))
            low, high = chunks[self._rank]
            return torch.equal(found[low:high].cpu(), bench_patterns.repeat_block(total, self._length)[low:high])
        return all(self._is_from(found, source, chunks[at]) for source, at in self._gets())

    def _gets(self) -> list[tuple[int, int]]:
        """Return the source and the chunk of all that this rank gets."""
        ranks = range(self._world)
        if self._collective == "broadcast":
            return [(ROOT, 0)]
        if self._collective == "scatter":
            return [(ROOT, self._rank)]
        if self._collective == "all-to-all":
            return [(source, source * self._world + self._rank) for source in ranks]
        return [(source, source) for source in ranks] if self._collective == "all-gather" or self._rank == ROOT else []

    def _is_from(self, found: torch.Tensor, source: int, chunk: tuple[int, int]) -> bool:
        expected = bench_patterns.repeat_block(bench_patterns.whole(source), chunk[1])[chunk[0] :]
        return torch.equal(found[slice(*chunk)].cpu(), expected)


class PlayedCollective:
    """A collective as a schedule that is played on one vector.

    Args:
        name: the algorithm.
        options: of its schedule, as plain data.
        values: of the vector.
        collective: its name.
        rank, world: this rank, and their number.
        plane: moves vectors on the host; None: the engine does.
        group: the engine's, for vectors on `device` where there is no plane.
        device: of the vector.
    """

    def __init__(
        self, name: str, options: Mapping[str, object], values: CollectiveValues, collective: Collective, rank: int,
        world: int, plane: DataPlane | None, group: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        self.name, self._plane = name, plane
        given = msgspec.convert(options, ScheduleOptions)
        schedule = collectives.build(collective, world, name, root=ROOT, options=given)
        self.vector = torch.zeros(values.length, device=device)
        if plane is not None:
            self.vector = plane.buffer(values.length, torch.float32)
        engine = EngineChannel if device.type == "cpu" else BatchChannel
        channel: Channel = plane if plane is not None else engine(group)
        self._player = SchedulePlayer(schedule, rank, channel, what=collective)
        whole = len(values.chunks) == 1
        self._chunks = VectorChunks(schedule.ranges(values.length) if whole else values.chunks)

    def run(self) -> None:
        """Carry it out on the vector."""
        self._player.play(self.vector, self._chunks)

    def close(self) -> None:
        """Release the vector."""
        if self._plane is not None:
            self._plane.memory.release([self.vector])


class EngineCollective:
    """The engine's own collective, on the same vector.

    Args:
        collective: its name.
        values: of the vector.
        rank: this rank.
        group: the engine's.
        device: of the vector.
    """

    name = "native"

    def __init__(
        self, collective: Collective, values: CollectiveValues, rank: int, group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._collective, self._rank, self._group = collective, rank, group
        self.vector = torch.zeros(values.length, device=device)
        self._parts = [self.vector[low:high] for low, high in values.chunks]
        self._sizes = [high - low for low, high in values.chunks]
        self._space = torch.zeros(max(self._sizes), device=device)

    def run(self) -> None:
        """Carry it out on the vector."""
        group, parts, rank = self._group, self._parts, self._rank
        world = dist.get_world_size(group)
        own = parts[rank] if len(parts) > 1 else self.vector
        match self._collective:
            case "broadcast":
                dist.broadcast(self.vector, ROOT, group=group)
            case "reduce":
                dist.reduce(self.vector, ROOT, group=group)
            case "gather":
                dist.gather(own.clone(), parts if rank == ROOT else None, ROOT, group=group)
            case "scatter":
                dist.scatter(self._space[: len(own)], parts if rank == ROOT else None, ROOT, group=group)
                own.copy_(self._space[: len(own)])
            case "all-gather":
                dist.all_gather(parts, own.clone(), group=group)
            case "reduce-scatter":
                dist.reduce_scatter(self._space[: len(own)], parts, group=group)
                own.copy_(self._space[: len(own)])
            case _:
                mine = slice(rank * world, (rank + 1) * world)
                got = torch.empty(sum(self._sizes[rank::world]), device=self.vector.device)
                flat = torch.cat(parts[mine])
                dist.all_to_all_single(got, flat, self._sizes[rank::world], self._sizes[mine], group=group)
                for part, piece in zip(parts[rank::world], torch.split(got, self._sizes[rank::world]), strict=True):
                    part.copy_(piece)

    def close(self) -> None:
        """Release nothing."""
