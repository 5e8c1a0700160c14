"""Sums gradients over all ranks in buckets, while backward still runs: by the engine, or by playing a schedule.

Strategy `native` is the engine's own all-reduce (torch.distributed: NCCL between GPUs, Gloo between CPUs); the others
play their schedule (`collectives/allreduce_backends.py`). Everything else is the same for both, as in torch's
DistributedDataParallel with four differences: gradients are weighted by examples instead of by 1/N; `with
run.accumulate(): loss.backward()` works although the forward ran outside (DDP's no_sync must contain both); every call
into the model counts, not only its `forward`; and a parameter without a gradient on any rank keeps none, without a walk
through the graph at each forward (DDP's find_unused_parameters). The user's module is not wrapped: only its parameters
have hooks.

Buckets hold gradients of one type and device, last layers first, and are summed in one fixed order on every rank. The
last bucket also has one element a parameter that marks which ranks had a gradient; while `sync.bucket: auto` tries
sizes, the times of the former round follow (choice_tuner.py), and another size begins where a round has ended.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from psctl.collectives.allreduce_backends import AllReduceBackend, PendingSum
from psctl.errors import JobFailed
from psctl.job.activity import COMPUTE, waiting
from psctl.sync.bucket_layout import BucketSpace, buckets, padded
from psctl.sync.choice_tuner import ELEMENTS, ChoiceTuner
from psctl.sync.flat_parameters import gradient_of
from psctl.sync.linear_factors import LinearFactors
from psctl.types import BUCKET, Layout, PeerBytes, State

Chosen = Callable[[int, Sequence[tuple[int, float]]], object]
"""Takes the size of buckets that was chosen, and the sizes that were tried with the median of their seconds."""

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


def device_of_sums(device: torch.device, gpu: Callable[[torch.device], str] = gpu_of) -> torch.device:
    """Return where vectors must lie to be summed: on the host where two ranks share a GPU; every rank must call it.

    Args:
        device: where the model's parameters are.
        gpu: names a device's GPU.
    """
    name = gpu(device)
    pair = find_shared_gpu(name) if name else None
    if pair is not None and dist.get_rank() == 0:
        print(
            f"psctl: worker/{pair[0]} and worker/{pair[1]} share a GPU, which NCCL refuses: gradients are summed "
            "in the host's memory; with one worker a GPU they need not leave the GPUs",
            file=sys.stderr,
            flush=True,
        )
    return device if pair is None else torch.device("cpu")


class EngineGroup:
    """The engine's process group of psctl: NCCL where each rank has a GPU of its own, else Gloo.

    Args:
        device: where the model's parameters are.
        gpu: names a device's GPU.
    """

    def __init__(self, device: torch.device, gpu: Callable[[torch.device], str] = gpu_of) -> None:
        self._ours = init_default_group(device)
        self.device = device_of_sums(device, gpu)
        """Where vectors must lie to be summed."""
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
        size: bytes of a bucket, unless there is a tuner.
        tuner: tries sizes in the first rounds.
        on_chosen: called when the tuner has chosen, or at once where it has nothing to try.
    """

    def __init__(
        self, group: EngineGroup | None, backend: AllReduceBackend, parameters: Sequence[nn.Parameter],
        halves: torch.dtype | None = None, factors: Mapping[int, LinearFactors] = NO_FACTORS, *, size: int = BUCKET,
        tuner: ChoiceTuner | None = None, on_chosen: Chosen = lambda size, measured: None,
    ) -> None:  # fmt: skip
        self._group, self._backend, self._parameters, self._halves = group, backend, parameters, halves
        self._factors = factors
        self._size, self._tuner, self._on_chosen = size, tuner, on_chosen
        self._space: BucketSpace | None = None
        self._flat: list[torch.Tensor] = []
        if tuner is not None and tuner.measures and backend.takes_parts:
            self._space = BucketSpace(backend, self._needs(tuner.choices))
        self._divide()
        self._ready: dict[int, float] = {}  # bucket -> weight; a bucket before it is not ready
        self._next = 0
        self._works: list[PendingSum] = []
        self._finishing = False
        if tuner is not None and not tuner.measures:  # one division fits all sizes, or a checkpoint has the choice
            on_chosen(tuner.choice, tuner.medians)

    @property
    def tuning(self) -> State:
        """The progress of the choice of a size, for a checkpoint or a replacement; empty where none is chosen."""
        return self._tuner.state() if self._tuner is not None else {}

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
        if self._end_round():
            self._divide()

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

    # ---- the division into buckets -------------------------------------------------------------------------------

    def _divide(self, size: int | None = None, *, measures: bool | None = None) -> None:
        """Divide the gradients for the round that begins; no vector of the former division is used any more.

        Args:
            size: bytes of a bucket; None: of the tuner, or the given size.
            measures: the last bucket has times; None: as the tuner says.
        """
        if size is None:
            size = self._tuner.choice if self._tuner is not None else self._size
        if measures is None:
            measures = self._tuner is not None and self._tuner.measures
        self._present_size, self._measures = size, measures
        self.buckets: list[list[int]] = buckets(self._parameters, size=size, apart=self._factors)
        if self._space is not None:
            self._space.begin()
        else:
            for each in self._flat:
                self._backend.release(each)
        self._flat = [self._make(index) for index in range(len(self.buckets))]

    def _end_round(self) -> bool:
        """Count a round of the choice of a size; return whether the gradients are divided anew."""
        if self._tuner is None or not self._measures:
            return False
        size = self._tuner.choice
        self._tuner.end_round([float(number) for number in self._flat[-1][-ELEMENTS:].tolist()])
        if not self._tuner.measures:
            self._on_chosen(self._tuner.choice, self._tuner.medians)
        return self._tuner.choice != size or not self._tuner.measures

    def _make(self, index: int) -> torch.Tensor:
        length, dtype, device = self._vector(self.buckets, index)
        length += ELEMENTS if self._measures and index == len(self.buckets) - 1 else 0
        if self._space is not None:
            return self._space.vector(length, dtype, device)
        return self._backend.buffer(length, dtype, device)

    def _vector(self, divided: Sequence[Sequence[int]], index: int) -> tuple[int, torch.dtype, torch.device]:
        """Return elements, type and device of a bucket's vector."""
        first = self._parameters[divided[index][0]]
        size = sum(self._elements(at) for at in divided[index])
        more = len(self._parameters) if index == len(divided) - 1 else 0
        narrow = self._halves is not None and self._halves.itemsize < first.dtype.itemsize
        return size + more, self._halves if narrow and self._halves is not None else first.dtype, first.device

    def _needs(self, sizes: Sequence[int]) -> dict[torch.device, int]:
        """Return the bytes on each device that the vectors of any of these sizes need at most."""
        most: dict[torch.device, int] = {}
        for size in sizes:
            divided, needs = buckets(self._parameters, size=size, apart=self._factors), dict[torch.device, int]()
            for index in range(len(divided)):
                length, dtype, device = self._vector(divided, index)
                needs[device] = needs.get(device, 0) + padded((length + ELEMENTS) * dtype.itemsize)
            most |= {device: max(need, most.get(device, 0)) for device, need in needs.items()}
        return most

    def _elements(self, at: int) -> int:
        """Return the elements that are sent for a parameter."""
        return self._factors[at].elements if at in self._factors else self._parameters[at].numel()

    def _has_gradient(self) -> list[bool]:
        """Return for each parameter whether any rank had a gradient."""
        if all(parameter.grad is not None for parameter in self._parameters):
            return [True] * len(self._parameters)  # this rank had all: no wait for a GPU is needed
        return [marks > 0 for marks in self._marks().tolist()]

    def _marks(self) -> torch.Tensor:
        end = len(self._flat[-1]) - (ELEMENTS if self._measures else 0)
        return self._flat[-1][end - len(self._parameters) : end]

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
                if self._measures and self._tuner is not None:
                    self._tuner.write(flat[-ELEMENTS:])

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


def local_device() -> torch.device:
    """Return this process's device: the GPU of its local rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
