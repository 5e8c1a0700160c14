"""Strategy `ps` where servers step (`update: server`): gradients are sent during backward, new values are received.

A shard is pushed when all gradients in it are computed. `optimizer.step()` pushes the rest, orders the servers' step
with the numbers that the user's groups hold then, and requests the new values. A pushed gradient can not be changed or
recomputed: the checks here raise an error where a script does so.

With `step_in_backward` the servers step a part of the shards as soon as all ranks have pushed them, and these values
return while backward pushes the others; they become the parameters' values in the next forward, as all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import nn

from psctl.client.dense_client import ParameterClient
from psctl.process.step_ring import StepRecorder
from psctl.ps.dense.server.aggregation import square
from psctl.ps.server_optimizers import numbers
from psctl.sync.flat_parameters import FlatParameters
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.piecewise_sync import PieceHolders, PiecewiseSync, TrainedParts
from psctl.sync.synchronizer import ExampleWeight


class PendingParameters:
    """The parameters whose newest values are not in the model yet, and the waits for them.

    Args:
        client: after `start`; it calls this object with new values.
        flat: copies values into parameters.
        spans: records the times of waits.
    """

    def __init__(self, client: ParameterClient, flat: FlatParameters, spans: StepRecorder) -> None:
        self._client, self._flat, self._spans = client, flat, spans
        self._lock = threading.RLock()
        self._version = client.base
        self._pending: set[int] = set()
        self._asked = 0  # when this version was pulled
        self.staleness = 0
        """Clocks that the values of the last complete step lacked."""
        self._lacked = 0
        self._wanted: set[int] | None = None  # parameters that take delivered values; None: all
        self._left: dict[int, tuple[int, set[int]]] = {}  # shard -> a version's clocks, parameters that lack it
        self._clocks = [client.base] * len(flat.shards)  # the values in the model contain all clocks before it
        client.deliver(self._take)

    def expect(self, version: int, asked: int) -> None:
        """Make every parameter pending: all change to `version`, which was pulled at `asked`."""
        with self._lock:
            self.wait()  # versions that no forward has read are received in order, too
            self._version, self._asked = version, asked
            self.staleness, self._lacked = self._lacked, 0
            self._pending = set(range(len(self._flat.parameters)))

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Return when these parameters (None: all) hold the newest values."""
        if not self._pending:
            return
        with self._lock:
            wanted = self._pending if indices is None else self._pending.intersection(indices)
            if not wanted:
                return
            shards = sorted({shard for index in wanted for shard in self._flat.shards_of[index]})
            self._wanted = wanted
            try:
                self._wait_for_client(shards)
            finally:
                self._wanted = None
            self._lacked = max(self._lacked, self._version - min(self._clocks[shard] for shard in shards))
            self._pending = self._pending - wanted
            if not self._pending:
                self._spans.pulled(self._asked, self._client.answered_at)

    def wait_exact(self) -> None:
        """Return when every parameter holds all clocks before the newest version, whatever the staleness."""
        with self._lock:
            self.wait()
            shards = list(range(len(self._flat.shards)))
            if self._client.complete_clocks(shards) < self._version:
                self._wait_for_client(shards, exact=True)

    def _wait_for_client(self, shards: list[int], *, exact: bool = False) -> None:
        began = self._spans.now()
        self._flat.finish_pushes()
        self._flat.finish_reads()
        self._client.wait(self._version, shards, exact=exact)
        self._spans.synchronized(began)

    def _take(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        """Copy a shard's values into the wanted parameters; return whether all of the shard's parameters have them."""
        self._flat.read(shard, values, self._wanted)
        self._clocks[shard] = clocks
        if self._wanted is None:
            self._left.pop(shard, None)
            return True
        of, left = self._left.get(shard, (clocks, set(self._flat.members[shard])))
        left = (left if of == clocks else set(self._flat.members[shard])) - self._wanted
        if left:
            self._left[shard] = clocks, left
        else:
            self._left.pop(shard, None)
        return not left


HOLDERS = PieceHolders("pushed to the servers", "servers cannot run")


class ParameterServerSync(PiecewiseSync):
    """The synchronizer of servers that hold the values and step the optimizer.

    Args:
        model: the user's, before its class changes.
        names: of the trainable parameters.
        optimizer: the user's; its groups' numbers travel with each step.
        client: after `start`.
        flat: where parameters lie in the client's buffers.
        weight: of this rank's gradient.
        spans: records the times of steps.
        in_backward: some shards are stepped before the others are pushed.
        asynchronous: asp: servers apply this rank's gradient alone.
        on_unfit: called with the step and the problem when servers cannot take the first step; does not return. None:
            the script gets an error.
    """

    update = "server"
    write_refusal = "the servers hold its values and would overwrite what is loaded"

    def __init__(
        self, model: nn.Module, names: Sequence[str], optimizer: torch.optim.Optimizer, client: ParameterClient,
        flat: FlatParameters, weight: ExampleWeight, trace: GradientTrace | None = None,
        spans: StepRecorder | None = None, *, in_backward: bool = False,
        asynchronous: bool = False, on_unfit: Callable[[int, str], NoReturn] | None = None,
    ) -> None:  # fmt: skip
        spans = spans or StepRecorder()
        self.is_asynchronous = asynchronous
        self._client, self._flat = client, flat
        self._pending = PendingParameters(client, flat, spans)
        self._early: frozenset[int] = frozenset()  # the shards that step in backward, at this clock
        super().__init__(
            "ps", TrainedParts(model, names, flat.parameters, optimizer), flat.members, client, self._pending, HOLDERS,
            weight, client.base, on_unfit, trace, spans, in_backward=in_backward,
        )  # fmt: skip

    @property
    def sync_seconds(self) -> float:
        return self._client.seconds_waiting

    @property
    def in_flight_seconds(self) -> float:
        return self._client.seconds_in_flight

    @property
    def staleness(self) -> int:
        return self._pending.staleness

    def wait_exact(self) -> None:
        self._pending.wait_exact()

    def wait_newest(self) -> None:
        self._pending.wait()

    def save_last(self, step: int) -> None:
        self._client.save(self._clock)

    def store_rank_state(self, step: int, make_state: Callable[[], bytes]) -> None:
        self._client.keep_rank_state(step, make_state())

    def fetch_rank_state(self, step: int) -> tuple[int, bytes]:
        return step, self._client.rank_state(step)

    def close(self, reason: str, *, failed: bool) -> None:
        super().close(reason, failed=failed)
        if not failed:
            self._flat.finish_pushes()
            self._client.settle()
        self._flat.close()
        self._client.close(reason)

    def _send(self, bucket: int, weight: float) -> None:
        if self._groups is not None and not self._pushed:
            self._flat.finish_reads()
            self._early = self._client.order_in_backward(self._clock, self._groups)
        self._flat.push(self._client, self._clock, bucket, weight)
        if bucket in self._early:
            self._client.pull_in_backward(self._clock + 1, bucket)

    def _norm(self) -> float:
        if self.is_asynchronous:  # this rank's own gradient is applied
            gradients = [one.grad for one in self._flat.parameters if one.grad is not None]
            squares = {index: square(gradient) for index, gradient in enumerate(gradients)}
        else:
            self._flat.finish_pushes()
            squares = self._client.norms(self._clock)
        return float(sum(squares[index] for index in sorted(squares)) ** 0.5)

    def _step_pieces(self, save: bool) -> None:
        self._flat.finish_pushes()
        self._client.step(self._clock, numbers(self._optimizer), self._scale, save)
        self._spans.pushed(self._push_began)
        self._flat.finish_reads()
        asked = self._spans.now()
        self._client.pull(self._clock + 1)
        self._pending.expect(self._clock + 1, asked)
