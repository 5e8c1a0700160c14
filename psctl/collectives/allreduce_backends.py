"""How one flat vector is summed over all ranks: by the engine itself, or by a schedule that is played.

All collectives share everything else: buckets, their order, their overlap with backward, weights
(`sync/bucket_allreduce.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from psctl.collectives.channel import (
    BatchChannel,
    Channel,
    EngineChannel,
    LentPiece,
    Parcel,
    PendingTransfer,
    VectorExchange,
)
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.player import PlayQueue, SchedulePlayer
from psctl.schedule.schedule import Schedule

SHORT = 64 << 10
"""Bytes of a vector that is summed sooner than another thread is woken."""


SPREAD = 8 << 20
"""Bytes of start values that travel together."""

HOST = torch.device("cpu")


class PendingSum(Protocol):
    """A vector that is on its way."""

    def wait(self) -> Any:
        """Return when it is summed; once. Raises when a rank is lost."""


class AllReduceBackend(Protocol):
    """Sums vectors in place over all ranks, in one order on every rank."""

    world: int

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a vector of zeros that is summed without a copy."""

    def put(self, vector: torch.Tensor) -> PendingSum:
        """Begin to sum a vector."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that this rank sent and received: counted where they are psctl's own, else those of the schedule."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that have not brought what is waited for now; empty when nothing is, or it is not known."""

    def close(self) -> None:
        """End threads; nothing is on its way."""


class EngineAllReduce:
    """The engine's own all-reduce.

    Args:
        group: the engine's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.world = dist.get_world_size(group)
        self.bytes_moved = 0
        self.waits_for: tuple[int, ...] = ()  # the engine does not say

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    def put(self, vector: torch.Tensor) -> PendingSum:
        work: PendingSum = dist.all_reduce(vector, group=self._group, async_op=True)
        self.bytes_moved += 2 * (2 * vector.nbytes * (self.world - 1) // self.world)  # the engine's ring
        return work

    def close(self) -> None:
        return


def spread(summing: AllReduceBackend, first: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite these tensors with rank 0's, bit by bit: their bytes are summed as whole numbers, of the others zeros.

    Args:
        summing: of vectors on the host.
        first: this is rank 0.
        tensors: the same shapes and types on every rank.
    """
    with torch.no_grad():
        wholes = [each.detach() for each in tensors if each.numel()]
        copies = [each.contiguous() for each in wholes]
        pieces = [piece for each in copies for piece in torch.split(each.view(-1).view(torch.uint8), SPREAD)]
        room = summing.buffer(min(SPREAD, sum(piece.numel() for piece in pieces) + 3) // 4, torch.int32, HOST)
        while pieces:
            sizes = itertools.accumulate(piece.numel() for piece in pieces)
            count = sum(size <= room.nbytes for size in sizes)
            _exchange(summing, first, room, pieces[:count])
            del pieces[:count]
        for whole, copy in zip(wholes, copies, strict=True):
            if copy.data_ptr() != whole.data_ptr():
                whole.copy_(copy)


def _exchange(summing: AllReduceBackend, first: bool, room: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    sizes = [piece.numel() for piece in pieces]
    used = room[: -(-sum(sizes) // 4)]
    used.zero_()
    places = torch.split(used.view(torch.uint8)[: sum(sizes)], sizes)
    if first:
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece)
    summing.put(used).wait()
    if not first:
        for place, piece in zip(places, pieces, strict=True):
            piece.copy_(place)


class ScheduleAllReduce:
    """A schedule, played on a thread of its own (on GPUs: on a stream of its own) while backward goes on.

    The helper of strategy `cpu`, the node behind the ranks, is played in rank 0's process, on memory of the host.

    Args:
        schedule: what is played.
        device: where the vectors are; the host where a helper adds (`played_on_host`).
        plane: psctl's own data plane, which carries what is on the host; else the engine does.
        group: what the engine plays it over, when nothing else is; None: one is made. Of Gloo on the host.
        shared: others use the plane too; it stays open, and gets its buffers back.
    """

    def __init__(
        self, schedule: Schedule, device: torch.device, plane: DataPlane | None = None, group: Any = None,
        *, shared: bool = False,
    ) -> None:  # fmt: skip
        self._schedule, self._plane, self._shared = schedule, plane, shared
        self._buffers: list[torch.Tensor] = []
        self._moved = 0
        on_host = device.type == "cpu"
        self._spare: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        if plane is None:
            group = group if group is not None else dist.new_group(backend="gloo" if on_host else "nccl")
            self._rank = dist.get_rank(group)
            dist.barrier(group)  # NCCL wants all ranks in a group's first operation
        else:
            self._rank = plane.me
        self.world = schedule.world
        helpers = range(schedule.world, schedule.nodes) if self._rank == 0 else range(0)
        self._players = _players(schedule, [self._rank, *helpers], plane, group, on_host=on_host)
        self._helping = [PlayQueue(player.play) for player in self._players[1:]]
        self._own = PlayQueue(self.play) if on_host else StreamQueue(self.play)

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._plane is not None:
            self._buffers.append(self._plane.buffer(length, dtype))
            return self._buffers[-1]
        return torch.zeros(length, dtype=dtype, device=device)

    def put(self, vector: torch.Tensor) -> PendingSum:
        if self._plane is None:
            self._moved += 2 * int(self._schedule.sent(vector.nbytes)[self._rank])
        return self._own.put(vector, SHORT) if isinstance(self._own, PlayQueue) else self._own.put(vector)

    @property
    def bytes_moved(self) -> int:
        return self._moved if self._plane is None else self._plane.bytes_moved

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._plane.waits_for if self._plane is not None else ()

    def close(self) -> None:
        for each in (self._own, *self._helping):
            each.close()
        if self._plane is not None and not self._shared:
            self._plane.close()
        elif self._plane is not None:
            self._plane.release(self._buffers)

    def play(self, vector: torch.Tensor) -> None:
        """Sum a vector now, on the calling thread; not while others are on their way."""
        helping = [each.put(self._helpers(vector)) for each in self._helping]
        self._players[0].play(vector)
        for each in helping:
            each.wait()

    def _helpers(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a helper."""
        key = like.numel(), like.dtype
        if key not in self._spare:
            self._spare[key] = self.buffer(*key, like.device)
        return self._spare[key]


def played_on_host(schedule: Schedule, device: torch.device) -> bool:
    """Whether a schedule is played on memory of the host: vectors lie there, or a helper needs them there."""
    return device.type == "cpu" or schedule.nodes > schedule.world


def _players(
    schedule: Schedule, nodes: Sequence[int], plane: DataPlane | None, group: Any, *, on_host: bool
) -> list[SchedulePlayer]:  # fmt: skip
    """Return the players of the nodes in this process."""
    if not on_host:
        return [SchedulePlayer(schedule, nodes[0], BatchChannel(group))]
    outside: Channel = plane if plane is not None else EngineChannel(group, schedule.nodes)
    if len(nodes) == 1:
        return [SchedulePlayer(schedule, nodes[0], outside)]
    inside = LocalExchange()
    return [SchedulePlayer(schedule, node, LocalChannel(node, nodes, inside, outside)) for node in nodes]


class StreamQueue:
    """Plays vectors on a CUDA stream of its own; the host waits for nothing.

    Args:
        play: puts the work of a sum on the current stream.
    """

    def __init__(self, play: Any) -> None:
        self._play = play
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def put(self, vector: torch.Tensor) -> PendingSum:
        """Have a vector summed that the current stream has filled."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._play(vector)
            return _Event(self._stream.record_event())

    def close(self) -> None:
        """Wait for what was put."""
        self._stream.synchronize()


class _Event:
    """A place in a stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._event)


class LocalExchange:
    """What nodes of one process send each other: copied when both ends have posted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._posted: dict[tuple[int, int, int, bool], deque[LocalTransfer]] = {}
        self._ended = False

    def post(self, source: int, destination: int, tag: int, piece: torch.Tensor, *, sends: bool) -> LocalTransfer:
        """Post one end."""
        with self._changed:
            others = self._posted.get((source, destination, tag, not sends))
            if others:
                other = others.popleft()
                first, second = (piece, other.piece) if sends else (other.piece, piece)
                second.copy_(first)
                other.done = True
                self._changed.notify_all()
                return LocalTransfer(self, piece, done=True)
            mine = LocalTransfer(self, piece, done=self._ended)
            self._posted.setdefault((source, destination, tag, sends), deque()).append(mine)
            return mine

    def wait(self, copy: LocalTransfer) -> None:
        """Return when it is copied."""
        with self._changed:
            self._changed.wait_for(lambda: copy.done or self._ended)
            if self._ended:
                raise RuntimeError("another node of this process lost a peer")

    def abort(self) -> None:
        """End every wait with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class LocalTransfer:
    """One end of what is copied inside a process."""

    def __init__(self, inside: LocalExchange, piece: torch.Tensor, *, done: bool) -> None:
        self._inside, self.piece, self.done = inside, piece, done

    def wait(self) -> None:
        """Return when it is copied."""
        self._inside.wait(self)


class LocalChannel:
    """The channel of a node whose process has other nodes too.

    Args:
        node: whose it is.
        here: the nodes of this process.
        inside: carries what they send each other.
        outside: carries the rest.
    """

    ahead = True

    def __init__(self, node: int, here: Sequence[int], inside: LocalExchange, outside: Channel) -> None:
        self._node, self._here, self._inside, self._outside = node, set(here), inside, outside

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        return [
            *(self._one(each, sends=True) for each in sends),
            *(self._one(each, sends=False) for each in receives),
        ]

    def _one(self, each: Parcel, *, sends: bool) -> PendingTransfer:
        if each.peer not in self._here:
            return self._outside.post([each] if sends else [], [] if sends else [each])[0]
        source, destination = (self._node, each.peer) if sends else (each.peer, self._node)
        return self._inside.post(source, destination, each.tag, each.piece, sends=sends)

    def lends(self, peer: int) -> bool:
        return peer not in self._here and self._outside.lends(peer)

    def borrow(self, peer: int, tag: int) -> LentPiece:
        return self._outside.borrow(peer, tag)

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        if not isinstance(pending, LocalTransfer):
            return self._outside.arrived(pending, size)
        pending.wait()
        return True

    def board(self, size: int) -> VectorExchange | None:
        return None

    def abort(self, reason: str) -> None:
        self._inside.abort()
        self._outside.abort(reason)
