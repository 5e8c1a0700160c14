"""Sums vectors that lie on GPUs in the host's memory: where a helper adds there, and where processes share a GPU.

NCCL refuses two ranks on one GPU. Then, and for strategy `cpu`, a vector is copied to a buffer of the way that sums on
the host (shared memory, for schedules), and its sum back, in the order of streams (gpu_staging.py): nobody waits for
the device.
"""

from __future__ import annotations

import torch

from psctl.collectives.allreduce_backends import AllReduceBackend, PendingSum
from psctl.sync.device_copies import CopySpan, DeviceCopies
from psctl.sync.gpu_staging import Hand, Staging


class StagedAllReduce:
    """A `AllReduceBackend` around one that sums on the host.

    Args:
        summing: sums what lies on the host.
        copies: between there and the vectors; closed with it.
    """

    def __init__(self, summing: AllReduceBackend, copies: DeviceCopies) -> None:
        self._summing, self._copies, self._hand = summing, copies, Hand()
        self._staging = Staging(copies, self._hand.wake)
        self._hand.begin(self._staging.next)
        self._here: dict[int, torch.Tensor] = {}  # where each vector lies on the host, by its address
        self.world = summing.world

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        vector = torch.zeros(length, dtype=dtype, device=device)
        here = self._summing.buffer(length, dtype, torch.device("cpu"))
        self._here[vector.data_ptr()] = self._staging.lock(here)
        return vector

    def put(self, vector: torch.Tensor) -> PendingSum:
        on_its_way = StagedVector(
            self._summing, self._staging, self._copies, CopySpan(vector, 0, self._here[vector.data_ptr()])
        )
        self._staging.down([on_its_way.span])
        self._staging.then(on_its_way.begin)
        return on_its_way

    @property
    def bytes_moved(self) -> int:
        return self._summing.bytes_moved

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._summing.waits_for

    def close(self) -> None:
        self._hand.end()
        self._staging.close()
        self._summing.close()


class StagedVector:
    """A vector: on its way to the host, then among the ranks, then on its way back."""

    def __init__(self, summing: AllReduceBackend, staging: Staging, copies: DeviceCopies, span: CopySpan) -> None:
        self._summing, self._staging, self._copies, self.span = summing, staging, copies, span
        self._work: PendingSum | None = None

    def begin(self) -> None:
        """It is on the host."""
        self._work = self._summing.put(self.span.host)

    def wait(self) -> None:
        """Return when it is summed; what the current stream is given from now on sees the sum."""
        self._staging.settle()
        assert self._work is not None, "it was handed on"
        self._work.wait()
        self._copies.up([self.span])  # the next copy to the host is behind it, in the order of streams
