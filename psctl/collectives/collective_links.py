"""What the collectives of a training script are carried out with: channels, memory, and the choice of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from psctl.collectives.channel import BatchChannel, Channel, EngineChannel
from psctl.collectives.data_plane import DataPlane

ENDED = "psctl/collectives-ended"
"""The key of the engine's store under which the reason of an end is."""

KEPT = 64 << 20
"""Bytes of memory that are kept for the next collective; longer vectors are allocated for each."""


GpuChannel = Callable[[Sequence[int]], Channel]


class CollectiveLinks(Protocol):
    """The connections of one rank to all others."""

    channel: Channel
    """Moves pieces that lie on the CPU, between all ranks."""

    gpu_channel: GpuChannel | None
    """Returns the channel between the ranks of a group for pieces on GPUs; its peers are numbered by their places in
    the group, whose members call it in one order. None: pieces on GPUs go through the CPU."""
    shares_gpu: bool
    """Whether this rank's GPU is another rank's, too, which NCCL refuses."""

    def space(self, size: int) -> torch.Tensor:
        """Return `size` bytes on the CPU, of any content, from which peers can read fast."""

    def take_back(self, space: torch.Tensor) -> None:
        """Take back memory of `space` that no peer reads any more."""

    def end(self, reason: str) -> None:
        """End every wait, here and at the peers, with this reason; collectives cannot be used afterwards."""

    def why_ended(self) -> str:
        """Return the reason of the rank that ended collectives with `end`, where the channel does not carry it."""

    def close(self) -> None:
        """Release connections after queued data is sent."""


class EndStore(Protocol):
    """The engine's store, which all ranks reach."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value, which is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether these keys have values."""


class PlaneLinks:
    """Links over psctl's data plane; pieces on GPUs over NCCL, where each rank has a GPU of its own.

    Args:
        plane: between all ranks.
        gpu_channel, shares_gpu: as of `CollectiveLinks`.
    """

    def __init__(self, plane: DataPlane, gpu_channel: GpuChannel | None = None, *, shares_gpu: bool = False) -> None:
        self.channel: Channel = plane
        self._plane, self.gpu_channel, self.shares_gpu = plane, gpu_channel, shares_gpu
        self._kept: torch.Tensor | None = None

    def space(self, size: int) -> torch.Tensor:
        kept, self._kept = self._kept, None
        if kept is not None and kept.numel() >= size:
            return kept
        if kept is not None:
            self._plane.memory.release([kept])
        return self._plane.buffer(size, torch.uint8)

    def take_back(self, space: torch.Tensor) -> None:
        if self._kept is None and space.numel() <= KEPT:
            self._kept = space
        else:
            self._plane.memory.release([space])

    def end(self, reason: str) -> None:
        self._plane.abort(reason)

    def why_ended(self) -> str:
        return ""  # it comes with the peer's farewell

    def close(self) -> None:
        if self._kept is not None:
            self._plane.memory.release([self._kept])
        self._plane.close()


class EngineLinks:
    """Links over the engine: Gloo between CPUs, NCCL between GPUs.

    Args:
        group: Gloo's, of all ranks, used for nothing else.
        store: the engine's, for the reason of an end.
        gpu_channel, shares_gpu: as of `CollectiveLinks`.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: EndStore, gpu_channel: GpuChannel | None = None, *,
        shares_gpu: bool = False,
    ) -> None:  # fmt: skip
        self.channel: Channel = EngineChannel(group)
        self._group, self._store, self.gpu_channel, self.shares_gpu = group, store, gpu_channel, shares_gpu

    def space(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def take_back(self, space: torch.Tensor) -> None:
        return

    def end(self, reason: str) -> None:
        self._store.set(ENDED, reason)
        self.channel.abort(reason)

    def why_ended(self) -> str:
        return self._store.get(ENDED).decode() if self._store.check([ENDED]) else ""

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class NcclChannels:
    """The channels between GPUs over NCCL, one for each group.

    Args:
        begin: makes the engine's default group where there is none.
    """

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin
        self._channels: dict[tuple[int, ...], BatchChannel] = {}

    def __call__(self, ranks: Sequence[int]) -> Channel:
        key = tuple(ranks)
        if key not in self._channels:
            self._begin()
            group = dist.new_group(sorted(key), backend="nccl", use_local_synchronization=True)
            dist.barrier(group)  # NCCL requires all ranks in a group's first operation
            self._channels[key] = BatchChannel(group, key)
        return self._channels[key]
