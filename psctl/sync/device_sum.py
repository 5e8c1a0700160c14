"""Sums vectors that lie on GPUs in host memory: for strategy `cpu`, and where processes share a GPU.

NCCL refuses two ranks on one GPU. There, and where a schedule has a helper on the host, a vector is copied to a buffer
of a backend that sums on the host (shared memory, for schedules), and its sum is copied back, in the order of streams
(gpu_staging.py): the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psctl.collectives.allreduce_backends import AllReduceBackend, PendingSum
from psctl.sync.device_copies import CopySpan, CudaCopies
from psctl.sync.gpu_staging import Staging
from psctl.types import PeerBytes


class StagedAllReduce:
    """An `AllReduceBackend` for vectors on GPUs, around one that sums on the host.

    Args:
        backend: sums vectors on the host; closed with this.
        copies: between host and GPUs; closed with this.
    """

    takes_parts = False

    def __init__(self, backend: AllReduceBackend, copies: CudaCopies) -> None:
        self._backend, self._copies = backend, copies
        self._staging = Staging(copies)
        self._hosts: dict[int, torch.Tensor] = {}  # each vector's buffer on the host, by the vector's address
        self.world = backend.world

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        vector = torch.zeros(length, dtype=dtype, device=device)
        host = self._backend.buffer(length, dtype, torch.device("cpu"))
        self._hosts[vector.data_ptr()] = self._staging.lock(host)
        return vector

    def release(self, vector: torch.Tensor) -> None:
        self._backend.release(self._hosts.pop(vector.data_ptr()))

    def put(self, vector: torch.Tensor) -> PendingSum:
        span = CopySpan(vector, 0, self._hosts[vector.data_ptr()])
        pending = StagedVector(self._backend, self._staging, self._copies, span)
        self._staging.copy_to_host([span])
        self._staging.run_after_copies(pending.begin)
        return pending

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self._backend.bytes_by_peer

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._backend.waits_for

    def close(self) -> None:
        self._staging.close()
        self._backend.close()


class StagedVector:
    """A vector that is copied to the host, summed there, and copied back."""

    def __init__(self, backend: AllReduceBackend, staging: Staging, copies: CudaCopies, span: CopySpan) -> None:
        self._backend, self._staging, self._copies, self._span = backend, staging, copies, span
        self._sum: PendingSum | None = None

    def begin(self) -> None:
        """Begin the sum: the vector is on the host."""
        self._sum = self._backend.put(self._span.host)

    def wait(self) -> None:
        """Return when it is summed; later work of the current stream sees the sum."""
        self._staging.settle()
        assert self._sum is not None, "`settle` has run `begin`"
        self._sum.wait()
        self._copies.to_devices([self._span])  # the next copy to the host is behind it, in the order of streams
