"""Sums gradients over all ranks in buckets, while backward still runs: by the engine, or by playing a schedule.

Strategy `native` is the engine's own all-reduce (torch.distributed: NCCL between GPUs, Gloo between CPUs); the others
play their schedule (`collectives/allreduce_backends.py`). Everything else is the same for both, as in torch's
DistributedDataParallel with four differences: gradients are weighted by examples instead of by 1/N; `with
run.accumulate(): loss.backward()` works although the forward ran outside (DDP's no_sync must contain both); every call
into the model counts, not only its `forward`; and a parameter without a gradient on any rank keeps none, without a walk
through the graph at each forward (DDP's find_unused_parameters). The user's module is not wrapped: only its parameters
have hooks.

Buckets hold gradients of one type and device, last layers first, and are summed in one fixed order on every rank. The
last bucket also has one element a parameter that marks which ranks had a gradient.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from psctl.collectives.allreduce_backends import AllReduceBackend, PendingSum
from psctl.errors import JobFailed
from psctl.job.activity import COMPUTE, waiting
from psctl.sync.flat_parameters import gradient_of
from psctl.sync.linear_factors import LinearFactors
from psctl.types import Layout, PeerBytes

FIRST_BUCKET = 1 << 20
"""Bytes; small, so that it is sent early."""

BUCKET = 25 << 20
"""Bytes; as DDP's default: large enough that a ring's latency does not count."""

NO_FACTORS: Mapping[int, LinearFactors] = MappingProxyType({})

NAME = 64
"""Bytes of a GPU's name."""


def gpu_of(device: torch.device) -> str:
    """Return the unique id of a GPU; "" for the CPU, and where torch does not report one."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def first_shared(gpus: Sequence[str]) -> tuple[int, int] | None:
    """Return the first two ranks with the same GPU, given each rank's `gpu_of`."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in first:
            return first[gpu], rank
        first[gpu] = rank
    return None


def init_default_group(device: torch.device) -> bool:
    """Make the engine's default group, for tensors on this device; False when the script has made one."""
    if dist.is_initialized():
        return False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return True


def find_shared_gpu(gpu: str) -> tuple[int, int] | None:
    """Return two ranks of the default group that share a GPU, which NCCL refuses; every rank must call it.

    Args:
        gpu: this rank's, as `gpu_of` names it.
    """
    mine = torch.zeros(NAME, dtype=torch.uint8)
    name = torch.frombuffer(bytearray(gpu.encode()[:NAME] or b"\0"), dtype=torch.uint8)
    mine[: len(name)] = name
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    gathering = dist.new_group(backend="gloo")
    dist.all_gather(every, mine, group=gathering)
    dist.destroy_process_group(gathering)
    return first_shared([bytes(one.tolist()).rstrip(b"\0").decode() for one in every])


class EngineGroup:
    """The engine's process group of psctl: NCCL where each rank has a GPU of its own, else Gloo.

    Args:
        device: where the model's parameters are.
        gpu: names a device's GPU.
    """

    def __init__(self, device: torch.device, gpu: Callable[[torch.device], str] = gpu_of) -> None:
        name = gpu(device)
        self._ours = init_default_group(device)
        pair = find_shared_gpu(name) if name else None
        self.device = device if pair is None else torch.device("cpu")
        """Where vectors must lie to be summed."""
        if pair is not None and dist.get_rank() == 0:
            print(
                f"psctl: worker/{pair[0]} and worker/{pair[1]} share a GPU, which NCCL refuses: gradients are summed "
                "in the host's memory; with one worker a GPU they need not leave the GPUs",
                file=sys.stderr,
                flush=True,
            )
        self.group: dist.ProcessGroup = dist.new_group(backend="nccl" if self.device.type == "cuda" else "gloo")
        self.world = dist.get_world_size(self.group)

    def same_everywhere(self, layout: Layout) -> None:
        """Compare the layouts of all ranks.

        Raises:
            JobFailed: some rank's model or optimizer differs from rank 0's; names the rank. The script's fault.
        """
        digest = hashlib.sha256(msgspec.json.encode(layout)).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self.group)
        other = [rank for rank, each in enumerate(every) if not torch.equal(each, every[0])]
        if other:
            raise JobFailed(
                f"rank {other[0]} was given another model or optimizer than rank 0 (names, shapes, types or groups)",
                "every rank must build the same model before run.prepare",
            )

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these tensors with rank 0's."""
        with torch.no_grad():
            for tensor in tensors:
                whole = tensor.detach()
                buffer = whole.to(self.device).contiguous()
                dist.broadcast(buffer, src=0, group=self.group)
                if buffer is not whole:
                    whole.copy_(buffer)

    def close(self) -> None:
        """Destroy the group, and the default group where psctl made it."""
        if dist.is_initialized():
            dist.destroy_process_group(None if self._ours else self.group)


class BucketReducer:
    """A reducer that sums buckets with an all-reduce backend.

    Args:
        group: the engine's; None where the engine takes no part.
        backend: sums a bucket.
        parameters: the trainable ones, in the model's order.
        halves: the type that gradients of more bits are rounded to, once, before they are summed; None: none are.
        factors: by the index of a parameter, the factors that are sent in place of its gradient.
    """

    def __init__(
        self,
        group: EngineGroup | None,
        backend: AllReduceBackend,
        parameters: Sequence[nn.Parameter],
        halves: torch.dtype | None = None,
        factors: Mapping[int, LinearFactors] = NO_FACTORS,
    ) -> None:
        self._group, self._backend, self._parameters, self._halves = group, backend, parameters, halves
        self._factors = factors
        self.buckets: list[list[int]] = buckets(parameters, apart=factors)
        self._flat: list[torch.Tensor] = [self._make(index) for index in range(len(self.buckets))]
        self._ready: dict[int, float] = {}  # bucket -> weight; a bucket before it is not ready
        self._next = 0
        self._works: list[PendingSum] = []
        self._finishing = False

    @property
    def activity(self) -> str:
        return waiting("the sum of gradients", self._backend.waits_for) if self._finishing else COMPUTE

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self._backend.bytes_by_peer

    def send(self, bucket: int, weight: float) -> None:
        self._ready[bucket] = weight
        while self._next in self._ready:
            self._fill(self._next, self._ready.pop(self._next))
            self._works.append(self._backend.put(self._flat[self._next]))
            self._next += 1

    def finish(self) -> None:
        assert self._next == len(self.buckets), "every bucket was sent"
        self._finishing = True
        for work in self._works:
            work.wait()
        self._finishing = False
        self._write_means()
        self._works.clear()
        self._next = 0

    def forget_factors(self) -> None:
        """Forget the rows of the step: the optimizer has stepped."""
        for each in self._factors.values():
            each.clear()

    def close(self, reason: str, *, failed: bool) -> None:
        for each in self._factors.values():
            each.close()
        if not failed:  # destroying the engine's group waits for ranks that may be lost
            self._backend.close()
            if self._group is not None:
                self._group.close()

    def _make(self, index: int) -> torch.Tensor:
        first = self._parameters[self.buckets[index][0]]
        size = sum(self._elements(at) for at in self.buckets[index])
        more = len(self._parameters) if index == len(self.buckets) - 1 else 0
        narrow = self._halves is not None and self._halves.itemsize < first.dtype.itemsize
        dtype = self._halves if narrow and self._halves is not None else first.dtype
        return self._backend.buffer(size + more, dtype, first.device)

    def _elements(self, at: int) -> int:
        """Return the elements that are sent for a parameter."""
        return self._factors[at].elements if at in self._factors else self._parameters[at].numel()

    def _has_gradient(self) -> list[bool]:
        """Return for each parameter whether any rank had a gradient."""
        if all(parameter.grad is not None for parameter in self._parameters):
            return [True] * len(self._parameters)  # this rank had all: no wait for a GPU is needed
        return [marks > 0 for marks in self._marks().tolist()]

    def _marks(self) -> torch.Tensor:
        return self._flat[-1][-len(self._parameters) :]

    def _split(self, bucket: Sequence[int], flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        found, start = [], 0
        for at in bucket:
            size = self._elements(at)
            found.append((at, flat.narrow(0, start, size)))
            start += size
        return found

    def _fill(self, index: int, weight: float) -> None:
        """Write this rank's part of a bucket's sum into the bucket's vector."""
        flat = self._flat[index]
        if (factors := self._factors.get(self.buckets[index][0])) is not None:  # alone in its bucket
            with torch.no_grad():
                factors.fill(flat, weight)
            return
        with torch.no_grad():
            for at, part in self._split(self.buckets[index], flat):
                gradient = self._parameters[at].grad
                if gradient is None:
                    part.zero_()
                elif part.dtype == gradient.dtype:
                    part.copy_(gradient.reshape(-1))
                else:  # the mean is summed, for a sum might be too large for float16
                    torch.mul(gradient.reshape(-1), weight / self._backend.world, out=part)
            if weight != 1.0 and flat.dtype == self._parameters[self.buckets[index][0]].dtype:
                flat.mul_(weight)
            if index == len(self.buckets) - 1:  # sent last, when all gradients of the round are computed
                marks = [float(parameter.grad is not None) for parameter in self._parameters]
                self._marks().copy_(torch.tensor(marks))

    def _write_means(self) -> None:
        """Write the means of all buckets, which are summed, into `.grad`."""
        present = self._has_gradient()
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            for at, part in self._split(bucket, flat):
                if not present[at]:
                    continue
                if at in self._factors:
                    self._factors[at].write_mean(part, gradient_of(self._parameters[at]))
                else:
                    self._write(self._parameters[at], part)

    def _write(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        gradient = gradient_of(parameter)
        gradient.copy_(total.view(parameter.shape))
        if total.dtype == parameter.dtype:
            gradient.div_(self._backend.world)


def buckets(
    parameters: Sequence[nn.Parameter], first: int = FIRST_BUCKET, size: int = BUCKET, apart: Collection[int] = ()
) -> list[list[int]]:
    """Put parameters into buckets of one type and device, last parameters first.

    Args:
        parameters: in the model's order.
        first: bytes of the first bucket that is sent.
        size: bytes of the others; a larger parameter has a bucket of its own.
        apart: indices of parameters that are alone in their buckets, none of which is the last; not of all parameters.
    """
    done: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for at in reversed(range(len(parameters))):
        if at in apart:
            done.append([at])
            continue
        parameter = parameters[at]
        kind = (parameter.dtype, parameter.device)
        open_buckets.setdefault(kind, []).append(at)
        filled[kind] = filled.get(kind, 0) + parameter.numel() * parameter.element_size()
        if filled[kind] >= (size if done else first):
            done.append(open_buckets.pop(kind))
            del filled[kind]
    done += open_buckets.values()
    last = max(place for place, bucket in enumerate(done) if bucket[0] not in apart)
    return [*done[:last], *done[last + 1 :], done[last]]


def local_device() -> torch.device:
    """Return this process's device: the GPU of its local rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
