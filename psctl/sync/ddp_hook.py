"""Sums the buckets of torch's DistributedDataParallel by the job's strategy, as its communication hook.

DistributedDataParallel makes the buckets, calls the hook for each when backward has filled it, and before backward ends
waits for the futures that the hook returned. So scripts whose loop belongs to another library (Trainers of Hugging Face
and Lightning, accelerate) have their gradients summed by the planned schedule over the job's connections. Each
synchronized backward counts as one step. psctl saves no checkpoint: the optimizer is not known here.

On CPUs a thread sums one bucket after another while backward goes on. On GPUs the sums are queued on streams.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from psctl.client.server_waits import InFlightTimer
from psctl.clock import Clock
from psctl.collectives.allreduce_backends import AllReduceBackend
from psctl.job.activity import COMPUTE, waiting
from psctl.sync.bucket_allreduce import EngineGroup
from psctl.sync.synchronizer import Synchronizer
from psctl.types import PeerBytes


class GradientBucket(Protocol):
    """A bucket as DistributedDataParallel hands it over: torch.distributed.GradBucket."""

    def index(self) -> int:
        """Return its number, from 0."""

    def buffer(self) -> torch.Tensor:
        """Return its gradients one after another; the future's vector takes their place."""

    def is_last(self) -> bool:
        """Return whether no other one of this backward follows."""


class _Bucket(NamedTuple):
    """A bucket on its way."""

    number: int
    gradients: torch.Tensor
    sum: torch.futures.Future[torch.Tensor]
    last: bool


class DdpHookSync(Synchronizer):
    """The synchronizer whose gradients DistributedDataParallel hands over, bucket by bucket.

    Args:
        name: the strategy's name.
        parameters: the trainable ones, in the model's order.
        backend: sums a bucket.
        group: the engine's; None where the engine takes no part.
        halves: the type that gradients of more bits are rounded to, once, before they are summed; None: none are.
        clock: measures waits.
        on_step: called when the last bucket of a backward is on its way.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], backend: AllReduceBackend, group: EngineGroup | None,
        halves: torch.dtype | None, clock: Clock, on_step: Callable[[], object],
    ) -> None:  # fmt: skip
        self._waits = _BackendWaits(backend)
        super().__init__(name, parameters, self._waits)
        self._backend, self._group, self._halves, self._clock, self._on_step = backend, group, halves, clock, on_step
        self._flat: dict[int, torch.Tensor] = {}
        self._timer = InFlightTimer(clock)
        on_gpu = parameters[0].is_cuda
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._work: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._thread = None if on_gpu else threading.Thread(target=self._loop, daemon=True, name="psctl-ddp")
        if self._thread is not None:
            self._thread.start()

    @property
    def in_flight_seconds(self) -> float:
        return self._timer.seconds

    def sum_bucket(self, bucket: GradientBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket; the future has the mean of all ranks."""
        gradients = bucket.buffer()
        devices: list[int | str | torch.device] = [gradients.device] if self._stream is not None else []
        found = _Bucket(bucket.index(), gradients, torch.futures.Future(devices=devices), bucket.is_last())
        if bucket.index() == 0:
            self._timer.start()
        if self._stream is None:
            self._work.put(found)
        else:
            self._sum_on_stream(found, self._stream)
        if found.last:
            self._on_step()
        return found.sum

    def close(self, reason: str, *, failed: bool) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(10.0)
        if not failed:  # destroying the engine's group waits for ranks that may be lost
            self._backend.close()
            if self._group is not None:
                self._group.close()

    def _loop(self) -> None:
        while (found := self._work.get()) is not None:
            began = self._clock.now()
            self._waits.waits = found.last  # backward is over, and waits for this sum
            try:
                self._mean(found)
            except Exception as error:  # noqa: BLE001  raised by backward, which waits for it
                found.sum.set_exception(error)  # type: ignore[arg-type]
                continue
            finally:
                self._waits.waits = False
            if found.last:
                self._sync_seconds += self._clock.now() - began
                self._timer.stop()
            found.sum.set_result(found.gradients)

    def _sum_on_stream(self, found: _Bucket, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._mean(found)
            found.sum.set_result(found.gradients)  # it holds the stream's event, for which backward waits
        if found.last:
            self._timer.stop()

    def _mean(self, found: _Bucket) -> None:
        """Replace a bucket's gradients by the mean over all ranks."""
        flat, gradients, world = self._buffer(found), found.gradients, self._backend.world
        narrow = flat.dtype != gradients.dtype
        with torch.no_grad():
            if narrow:  # the mean is summed, for a sum might be too large for float16
                torch.mul(gradients, 1 / world, out=flat)
            else:
                flat.copy_(gradients)
            self._backend.put(flat).wait()
            gradients.copy_(flat)
            if not narrow:
                gradients.div_(world)

    def _buffer(self, found: _Bucket) -> torch.Tensor:
        """Return the vector in which a bucket is summed; buckets are made anew after the first backward."""
        gradients, held = found.gradients, self._flat.get(found.number)
        dtype = self._halves if self._halves and self._halves.itemsize < gradients.dtype.itemsize else gradients.dtype
        if held is None or held.numel() != gradients.numel() or held.dtype != dtype:
            if held is not None:
                self._backend.release(held)
            held = self._flat[found.number] = self._backend.buffer(gradients.numel(), dtype, gradients.device)
        return held


class _BackendWaits:
    """Counts a backend's bytes, and says for whom its sums wait."""

    def __init__(self, backend: AllReduceBackend) -> None:
        self._backend = backend
        self.waits = False

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self._backend.bytes_by_peer

    @property
    def activity(self) -> str:
        return waiting("the sum of gradients", self._backend.waits_for) if self.waits else COMPUTE
