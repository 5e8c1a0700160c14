"""`update: sharded`: each rank steps the optimizer on its part of the parameters, between two halves of an all-reduce.

    backward         a bucket's gradients are summed at the owners of its chunks (reduce-scatter), last layers first
    optimizer.step() each rank steps its pieces, and the new values go to all ranks (all-gather), first layers first
    next forward     a module waits for the values of its parameters

The bytes are those of an all-reduce, but half of them travel during the next forward; and each rank holds and computes
one part of the optimizer's state in as many as there are ranks (ZeRO: Rajbhandari and others, SC 2020, its first
stage). Optimizers that are elementwise fit, as for servers (ps/server_optimizers.py). One vector a bucket serves both
halves, unless gradients travel in 16 bits: values never do.

With `step_in_backward` some buckets are stepped as soon as they are summed, and their values travel during backward
(backward_steps.py). The model gets them in the next forward, as all others.

A lost rank's state is lost with it, so all ranks start again from the last checkpoint, to which each rank gives its
pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from psctl.client.server_waits import InFlightTimer
from psctl.clock import Clock
from psctl.collectives.allreduce_backends import PendingSum
from psctl.collectives.partitioned_sums import ChunkRanges, PartitionBackend, by_rank
from psctl.job.activity import COMPUTE, waiting
from psctl.job.training_messages import Resume
from psctl.process.step_ring import StepRecorder
from psctl.ps.dense.server.aggregation import square
from psctl.ps.pieces import Piece
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.server_optimizers import PieceOptimizer, numbers
from psctl.ps.snapshot import CopiedSlice, KeptCopies, ShardLoading, by_parameter, copy_states, wanted_slices
from psctl.sync.backward_steps import BackwardSteps
from psctl.sync.bucket_allreduce import EngineGroup
from psctl.sync.bucket_layout import buckets
from psctl.sync.bucket_partition import VectorChunk, partition
from psctl.sync.flat_parameters import elements_of, write_piece
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.piecewise_sync import PieceHolders, PiecewiseSync, TrainedParts
from psctl.sync.synchronizer import ExampleWeight
from psctl.types import Layout, Number, PeerBytes, TensorSlice

HOLDERS = PieceHolders("sent to the ranks that step it", "ranks cannot run piece by piece")


class OwnedChunk:
    """A chunk that this rank owns: its values, and the optimizer over its pieces.

    Args:
        layout: names the optimizer and its groups.
        held: its pieces, by index in the layout.
        chunk: where it is in its bucket's vectors.
        values: the elements of its pieces, which steps change.
    """

    def __init__(self, layout: Layout, held: Sequence[Piece], chunk: VectorChunk, values: torch.Tensor) -> None:
        self.held, self.chunk, self.values = held, chunk, values
        self.optimizer = PieceOptimizer(layout, held, values)
        self.mean = torch.empty(0)
        """The joint gradient of its elements, once that is known."""
        self._layout, self._copies = layout, KeptCopies()

    def state_slices(self) -> list[CopiedSlice]:
        """Return copies of the optimizer's state, for a checkpoint."""
        return copy_states(self._layout, self.held, self.optimizer, self._copies)


class Bucket(NamedTuple):
    """Some parameters, and the vectors in which their gradients and values travel.

    `members`: indices into the trainable parameters; `pieces`: every piece of the vectors as (index of the parameter,
    piece, its place for the gradient, its place for the value); `marks`: for each chunk the elements that count
    gradients, and the indices of its parameters.
    """

    members: Sequence[int]
    gradients: torch.Tensor
    values: torch.Tensor
    ranges: ChunkRanges
    pieces: Sequence[tuple[int, Piece, torch.Tensor, torch.Tensor]]
    marks: Sequence[tuple[torch.Tensor, Sequence[int]]]
    owned: Sequence[OwnedChunk]


class ShardedBuckets:
    """The division of all trainable parameters into buckets and chunks, with this rank's chunks of them.

    Args:
        backend: owns the division into chunks, and makes the vectors.
        layout: of the model; the parameters' indices are those of the layout.
        parameters: the trainable ones, in the layout's order, with their start values.
        halves: the type in which gradients travel; None: their own.
        device: where vectors lie.
        size: bytes of a bucket.
    """

    def __init__(
        self, backend: PartitionBackend, layout: Layout, parameters: Sequence[nn.Parameter],
        halves: torch.dtype | None, device: torch.device, size: int,
    ) -> None:  # fmt: skip
        self._backend, self._layout, self.parameters = backend, layout, parameters
        self._halves, self.device = halves, device
        self._place = [index for index, info in enumerate(layout.parameters) if info.trainable]
        self.all = [self._make(members) for members in buckets(parameters, size=size)]
        self.bucket_of = {at: number for number, bucket in enumerate(self.all) for at in bucket.members}
        """By parameter, the number of its bucket."""
        self.values_of: dict[int, list[tuple[Piece, torch.Tensor]]] = {at: [] for at in self.bucket_of}
        """By parameter, its pieces, each with its place for the value."""
        for bucket in self.all:
            for at, piece, _, value in bucket.pieces:
                self.values_of[at].append((piece, value))

    @property
    def owned(self) -> list[OwnedChunk]:
        """This rank's chunks."""
        return [own for bucket in self.all for own in bucket.owned]

    def _make(self, members: Sequence[int]) -> Bucket:
        backend, dtype = self._backend, self.parameters[members[0]].dtype
        sizes = [(at, self.parameters[at].numel()) for at in members]
        chunks = partition(sizes, backend.owners, backend.shares, equal=backend.equal)
        narrow = self._halves if self._halves is not None and self._halves.itemsize < dtype.itemsize else None
        values = backend.sums.buffer(chunks[-1].stop, dtype, self.device)
        gradients = backend.sums.buffer(chunks[-1].stop, narrow, self.device) if narrow is not None else values
        pieces = [
            (one.parameter, one, _place(gradients, chunk, one), _place(values, chunk, one))
            for chunk in chunks
            for one in chunk.pieces
        ]
        marks = [
            (gradients.narrow(0, chunk.marks, len(chunk.pieces)), [piece.parameter for piece in chunk.pieces])
            for chunk in chunks
        ]
        owned = [self._own(chunk, dtype) for chunk in chunks if chunk.owner == backend.me and chunk.pieces]
        return Bucket(
            members, gradients, values, tuple((chunk.start, chunk.stop) for chunk in chunks), pieces, marks, owned
        )

    def _own(self, chunk: VectorChunk, dtype: torch.dtype) -> OwnedChunk:
        values = torch.empty(chunk.elements, dtype=dtype, device=self.device)
        for piece in chunk.pieces:
            values.narrow(0, piece.at, piece.size).copy_(elements_of(self.parameters[piece.parameter].detach(), piece))
        held = [Piece(self._place[one.parameter], one.within, one.at, one.size) for one in chunk.pieces]
        return OwnedChunk(self._layout, held, chunk, values)

    def load(self, resume: Resume, load: Callable[[Sequence[TensorSlice]], ReceivedSlices]) -> None:
        """Load this rank's pieces of the optimizer's state from a checkpoint, with any division among ranks.

        Args:
            resume: the checkpoint, from which the parameters have their values.
            load: reads slices of it.
        """
        saved = by_parameter(resume.tensors)
        wanted = [
            [each for each in wanted_slices(self._layout, own.held, saved) if each.key] for own in self.owned
        ]  # fmt: skip
        tensors = iter(load([each.slice for found in wanted for each in found]).tensors)
        for own, found in zip(self.owned, wanted, strict=True):
            ShardLoading(found, [next(tensors) for _ in found]).finish(own.held, own.values, own.optimizer)

    def fill(self, bucket: Bucket, weight: float) -> None:
        """Write this rank's part of a bucket's sum into its vector."""
        with torch.no_grad():
            for at, piece, place, _ in bucket.pieces:
                gradient = self.parameters[at].grad
                if gradient is None:
                    place.zero_()
                elif place.dtype == gradient.dtype:
                    place.copy_(elements_of(gradient, piece))
                else:  # the mean is summed, for a sum might be too large for float16
                    place.copy_(elements_of(gradient, piece) * (weight / self._backend.world))
            if weight != 1.0 and bucket.gradients is bucket.values:
                bucket.gradients.mul_(weight)
            for counts, members in bucket.marks:
                there = [float(self.parameters[at].grad is not None) for at in members]
                if all(there):
                    counts.fill_(1.0)
                else:
                    counts.copy_(torch.tensor(there))

    def take_means(self, bucket: Bucket) -> None:
        """Take the joint gradient of this rank's chunks, whose sums are in the vector."""
        for own in bucket.owned:
            total = bucket.gradients[own.chunk.start : own.chunk.start + own.chunk.elements]
            if bucket.gradients is bucket.values:
                own.mean = total.div_(self._backend.world)
            else:
                own.mean = total.to(own.values.dtype)

    def is_complete(self, bucket: Bucket) -> bool:
        """Return whether this rank has all gradients of a bucket."""
        return all(self.parameters[at].grad is not None for at in bucket.members)

    def step(
        self, bucket: Bucket, groups: Sequence[dict[str, Number]], scale: float | None, *, complete: bool
    ) -> None:  # fmt: skip
        """Step this rank's chunks of a bucket, and write their values into its vector.

        Args:
            bucket: the joint gradient of its chunks is known.
            groups: the numbers of the optimizer's groups.
            scale: of the gradient; None: 1.
            complete: this rank had all its gradients. Else some pieces may have none on any rank.
        """
        for own in bucket.owned:
            if scale is not None:
                own.mean.mul_(scale)
            own.optimizer.step(own.mean, self._has_gradient(bucket, own, complete=complete), groups)
            bucket.values[own.chunk.start : own.chunk.start + own.chunk.elements].copy_(own.values)

    def _has_gradient(self, bucket: Bucket, own: OwnedChunk, *, complete: bool) -> list[bool]:
        """Return for each piece of a chunk whether any rank had a gradient."""
        if complete:
            return [True] * len(own.chunk.pieces)  # no wait for a GPU is needed
        counts = bucket.gradients[own.chunk.marks : own.chunk.marks + len(own.chunk.pieces)]
        return [count > 0 for count in counts.tolist()]


def _place(vector: torch.Tensor, chunk: VectorChunk, piece: Piece) -> torch.Tensor:
    return vector.narrow(0, chunk.start + piece.at, piece.size)


class GatheredValues:
    """The parameters whose new values are not in the model yet.

    Args:
        shards: the buckets.
        clock: measures waits.
        spans: records the times of waits.
    """

    def __init__(self, shards: ShardedBuckets, clock: Clock, spans: StepRecorder) -> None:
        self._shards, self._clock, self._spans = shards, clock, spans
        self._lock = threading.RLock()
        self._pending: set[int] = set()
        self._gathering: dict[int, PendingSum] = {}  # bucket -> what is not waited for yet
        self.seconds = 0.0
        """Seconds of waits so far."""
        self.in_flight = InFlightTimer(clock)
        self.is_waiting = False

    def expect(self, gathering: Mapping[int, PendingSum]) -> None:
        """Make every parameter pending; the former values of all are in the model."""
        with self._lock:
            self._gathering = dict(gathering)
            self._pending = set(range(len(self._shards.parameters)))

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Return when these parameters (None: all) hold the newest values."""
        if not self._pending:
            return
        with self._lock:
            wanted = set(self._pending) if indices is None else self._pending.intersection(indices)
            for number in sorted({self._shards.bucket_of[at] for at in wanted}, reverse=True):  # as they are gathered
                self._await(number)
            with torch.no_grad():
                for at in wanted:
                    for piece, value in self._shards.values_of[at]:
                        write_piece(self._shards.parameters[at], piece, value)
            self._pending -= wanted
            if not self._pending:
                self.in_flight.stop()

    def _await(self, number: int) -> None:
        work = self._gathering.pop(number, None)
        if work is None:
            return
        began, at = self._clock.now(), self._spans.now()
        self.is_waiting = True
        try:
            work.wait()
        finally:
            self.is_waiting = False
        self.seconds += self._clock.now() - began
        self._spans.synchronized(at)


class ShardedSync(PiecewiseSync):
    """The synchronizer of ranks that each step a part of the parameters.

    Args:
        name: the strategy's.
        model: the user's, before its class changes.
        trainable: its trainable parameters by name, in the layout's order.
        optimizer: the user's, whose groups' numbers count; its own state stays empty.
        shards: the division of these.
        backend: sums and gathers.
        group: the engine's; None where it takes no part.
        weight: of this rank's gradient.
        clock: measures waits.
        in_backward: which buckets are stepped during backward; None: none, and clipping is possible.
        first_step: the step that the next one follows.
        on_unfit: called with the step and the problem when a script changes gradients in its first step.
        trace: notes gradients.
        spans: records the times of steps.
    """

    update = "sharded"
    write_refusal = "each rank holds its part of the values and would overwrite what is loaded"

    def __init__(
        self, name: str, model: nn.Module, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer,
        shards: ShardedBuckets, backend: PartitionBackend, group: EngineGroup | None, weight: ExampleWeight,
        clock: Clock, in_backward: BackwardSteps | None = None, first_step: int = 0,
        on_unfit: Callable[[int, str], NoReturn] | None = None,
        trace: GradientTrace | None = None, spans: StepRecorder | None = None,
    ) -> None:  # fmt: skip
        spans = spans or StepRecorder()
        self._early = in_backward
        self._gathering: dict[int, PendingSum] = {}  # buckets that were stepped in backward
        self._shards, self._backend, self._group, self._time = shards, backend, group, clock
        self._values = GatheredValues(shards, clock, spans)
        self._ready: dict[int, float] = {}  # bucket -> weight; a bucket before it is not ready
        self._next = 0
        self._sums: dict[int, PendingSum] = {}
        self._joint = False  # whether this rank's chunks hold the means
        super().__init__(
            name, TrainedParts(model, list(trainable), shards.parameters, optimizer),
            [bucket.members for bucket in shards.all], self, self._values, HOLDERS, weight, first_step, on_unfit,
            trace, spans, in_backward=in_backward is not None,
        )  # fmt: skip

    @property
    def sync_seconds(self) -> float:
        return self._sync_seconds + self._values.seconds

    @property
    def in_flight_seconds(self) -> float:
        return self._values.in_flight.seconds

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return self._backend.bytes_by_peer

    @property
    def activity(self) -> str:
        peers = self._backend.sums.waits_for
        if self._values.is_waiting:
            return waiting("values", peers)
        return waiting("the sum of gradients", peers) if self._sums and self._next == len(self._shards.all) else COMPUTE

    def wait_exact(self) -> None:
        self._values.wait()

    def wait_newest(self) -> None:
        self._values.wait()

    def finish(self) -> None:
        self._values.wait()

    def close(self, reason: str, *, failed: bool) -> None:
        super().close(reason, failed=failed)
        if not failed:  # destroying the engine's group waits for ranks that may be lost
            self._values.wait()
            self._backend.sums.close()
            if self._group is not None:
                self._group.close()

    def state_slices(self) -> list[CopiedSlice]:
        return [copied for own in self._shards.owned for copied in own.state_slices()]

    # ---- the step ----

    def _send(self, bucket: int, weight: float) -> None:
        if not self._pushed:  # the vectors still hold values that no forward has read
            self._values.wait()
            self._values.in_flight.start()
            if self._early is not None:
                self._early.begin_round()
        self._ready[bucket] = weight
        while self._next in self._ready:
            one = self._shards.all[self._next]
            self._shards.fill(one, self._ready.pop(self._next))
            self._sums[self._next] = self._backend.reduce(one.gradients, one.ranges)
            if self._early is not None and self._early.has(self._next):
                self._gathering[self._next] = self._early.gather(one.values, one.ranges, self._early_step(one))
            self._next += 1

    def _early_step(self, bucket: Bucket) -> Callable[[], None]:
        """Return a function that steps this rank's chunks of a bucket, when its sum has ended."""
        groups, complete = self._groups or (), self._shards.is_complete(bucket)

        def step() -> None:
            self._shards.take_means(bucket)
            self._shards.step(bucket, groups, None, complete=complete)

        return step

    def _norm(self) -> float:
        self._take_means()
        own = sum(square(chunk.mean) for chunk in self._shards.owned)
        return float(sum(by_rank(self._backend, own, self._shards.device)) ** 0.5)

    def _step_pieces(self, save: bool) -> None:
        self._await_sums()
        self._spans.pushed(self._push_began)
        if self._early is not None:
            self._early.end_round()
        groups = numbers(self._optimizer)
        for number in reversed(range(len(self._shards.all))):  # first layers first
            if number not in self._gathering:
                bucket = self._shards.all[number]
                if not self._joint:  # one at a time: the first layers' values are waited for
                    self._shards.take_means(bucket)
                self._shards.step(bucket, groups, self._scale, complete=self._shards.is_complete(bucket))
                self._gathering[number] = self._backend.gather(bucket.values, bucket.ranges)
        self._values.expect(self._gathering)
        self._gathering.clear()
        self._next, self._joint = 0, False

    def _take_means(self) -> None:
        """Take the joint gradient of all of this rank's chunks."""
        if self._joint:
            return
        self._await_sums()
        for bucket in self._shards.all:
            self._shards.take_means(bucket)
        self._joint = True

    def _await_sums(self) -> None:
        """Wait until the chunks that are stepped now are summed; others were stepped when they were."""
        if self._joint:
            return
        assert self._next == len(self._shards.all), "every bucket was sent"
        began, at = self._time.now(), self._spans.now()
        for number, work in self._sums.items():
            if number not in self._gathering:
                work.wait()
        self._sums.clear()
        self._sync_seconds += self._time.now() - began
        self._spans.synchronized(at)
