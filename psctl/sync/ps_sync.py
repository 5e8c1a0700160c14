"""Strategy `ps` where servers step (`update: server`): gradients are sent during backward, new values are received.

A shard is pushed when all gradients in it are computed. `optimizer.step()` pushes the rest, orders the servers' step
with the numbers that the user's groups hold then, and requests the new values. A pushed gradient can not be changed or
recomputed: the checks here raise an error where a script does so.

Values change only at wait points, between steps. Each module waits, before its first forward of a step, for the
parameters of its whole subtree, because a forward may read any parameter below it (MultiheadAttention reads out_proj's
without calling it). Plain containers (exactly Sequential, ModuleList, ModuleDict) read nothing themselves, so their
children wait instead, and the first layers compute while the values of the last layers are still received. The first
forward of any module waits for shared (tied) parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch import nn

from psctl.client.dense_client import ParameterClient
from psctl.errors import UsageError
from psctl.process.step_ring import StepRecorder
from psctl.ps.dense.server.aggregation import square
from psctl.ps.server_optimizers import fit_name, numbers
from psctl.sync.flat_parameters import FlatParameters
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.synchronizer import ExampleWeight, Synchronizer
from psctl.train_state.prepared_model import ForwardHooks, PreForwardHook

HINT = (
    "clip with run.clip_grad_norm(...) instead of torch.nn.utils, change gradients only under `with run.accumulate():`,"
    " or set `update: worker` under sync: in the job file (torch's clipping and GradScaler work there)"
)

PLAIN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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


class ValueWaitHook(PreForwardHook):
    """Waits for the newest values of some parameters, by their indices."""

    def __init__(self, pending: PendingParameters, indices: set[int]) -> None:
        self._pending, self._indices = pending, indices

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self._pending.wait(self._indices)


class ParameterServerSync(Synchronizer):
    """The synchronizer of servers that hold the values and step the optimizer.

    Args:
        model: the user's, before its class changes.
        names: of the trainable parameters.
        optimizer: the user's; its groups' numbers travel with each step.
        client: after `start`.
        flat: where parameters lie in the client's buffers.
        weight: of this rank's gradient.
        spans: records the times of steps.
        asynchronous: asp: servers apply this rank's gradient alone.
        on_unfit: called with the step and the problem when servers cannot take the first step; does not return. None:
            the script gets an error.
    """

    update = "server"
    write_refusal = "the servers hold its values and would overwrite what is loaded"

    def __init__(
        self, model: nn.Module, names: Sequence[str], optimizer: torch.optim.Optimizer, client: ParameterClient,
        flat: FlatParameters, weight: ExampleWeight, trace: GradientTrace | None = None,
        spans: StepRecorder | None = None, *,
        asynchronous: bool = False, on_unfit: Callable[[int, str], NoReturn] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("ps", flat.parameters, client)
        self.is_asynchronous, self._on_unfit = asynchronous, on_unfit
        self._names, self._optimizer, self._client, self._flat = names, optimizer, client, flat
        self._weight, self._trace = weight, trace
        self._clock = client.base
        self._scale: float | None = None
        self._pushed: set[int] = set()
        self._push_began = 0  # when the first of them was
        self._as_pushed: dict[int, tuple[torch.Tensor, int]] = {}  # parameter -> gradient and its version then
        self._members = _members(optimizer)
        self._spans = spans or StepRecorder()
        self._pending = PendingParameters(client, flat, self._spans)
        self._wait_hooks = ForwardHooks(
            [(module, ValueWaitHook(self._pending, indices)) for module, indices in wait_points(model, flat.parameters)]
        )
        self._hooks = GradientHooks(
            names, flat.parameters, flat.members,
            on_bucket=self._push, on_gradient=self._on_gradient, on_error=self._refuse,
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

    def accumulate(self) -> AbstractContextManager[None]:
        return self._hooks.paused()

    def hold_last_bucket(self, before: Callable[[], object]) -> None:
        super().hold_last_bucket(before)
        self._hooks.holds_last = True

    def wait_exact(self) -> None:
        self._pending.wait_exact()

    def wait_newest(self) -> None:
        self._pending.wait()

    def without_hooks(self) -> AbstractContextManager[None]:
        return self._wait_hooks.detached()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        self._check_gradients()
        self._push_rest()
        if self.is_asynchronous:  # this rank's own gradient is applied
            gradients = [one.grad for one in self._flat.parameters if one.grad is not None]
            squares = {index: square(gradient) for index, gradient in enumerate(gradients)}
        else:
            self._flat.finish_pushes()
            squares = self._client.norms(self._clock)
        norm = sum(squares[index] for index in sorted(squares)) ** 0.5
        self._scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(norm, dtype=self._flat.parameters[0].dtype)

    def step(self, original: Callable[[], object], save: bool) -> object:
        self._check_gradients()
        self._check_optimizer()
        self._push_rest()
        self._flat.finish_pushes()
        self._client.step(self._clock, numbers(self._optimizer), self._scale, save)
        self._spans.pushed(self._push_began)
        self._flat.finish_reads()
        asked = self._spans.now()
        self._client.pull(self._clock + 1)
        self._clock += 1
        self._scale = None
        self._pushed.clear()
        self._as_pushed.clear()
        self._hooks.next_round()
        self._pending.expect(self._clock, asked)
        if self._trace is not None:
            self._trace.flush()
        return None

    def save_last(self, step: int) -> None:
        self._client.save(self._clock)

    def store_rank_state(self, step: int, make_state: Callable[[], bytes]) -> None:
        self._client.keep_rank_state(step, make_state())

    def fetch_rank_state(self, step: int) -> tuple[int, bytes]:
        return step, self._client.rank_state(step)

    def close(self, reason: str, *, failed: bool) -> None:
        self._hooks.close()
        self._wait_hooks.remove()
        if not failed:
            self._flat.finish_pushes()
            self._client.settle()
        self._flat.close()
        self._client.close(reason)

    def _on_gradient(self, index: int) -> None:
        self._spans.gradient()
        if self._trace is not None:
            self._trace("gradient", clock=self._clock, parameter=self._names[index])
        if self._scale is not None:
            raise UsageError(
                f"a backward after run.clip_grad_norm() computed a gradient of parameter {self._names[index]}, whose "
                "norm is already in use",
                "clip after the last backward of a step, just before optimizer.step()",
            )
        gradient = self._flat.parameters[index].grad
        assert gradient is not None, "torch calls the hook after it is computed"
        self._as_pushed[index] = (gradient, gradient._version)

    def _push(self, shard: int) -> None:
        if not self._pushed:
            self._push_began = self._spans.now()
        self._flat.push(self._client, self._clock, shard, self._weight.weight)
        self._pushed.add(shard)

    def _push_rest(self) -> None:
        self.before_last_bucket()
        for shard in reversed(range(len(self._flat.shards))):
            if shard not in self._pushed:
                self._push(shard)
        for index, parameter in enumerate(self._flat.parameters):
            if parameter.grad is not None:
                self._as_pushed.setdefault(index, (parameter.grad, parameter.grad._version))

    def _check_gradients(self) -> None:
        """Raise when a gradient is not what was pushed."""
        for index, (gradient, version) in self._as_pushed.items():
            if self._pushed.isdisjoint(self._flat.shards_of[index]):
                continue
            now = self._flat.parameters[index].grad
            if now is not gradient or gradient._version != version:
                self._refuse(
                    f"the gradient of parameter {self._names[index]} changed after it was pushed to the servers "
                    "(clipping, unscaling, zero_grad or a write between backward and optimizer.step())",
                    HINT,
                )

    def _check_optimizer(self) -> None:
        """Raise when servers cannot run the optimizer any more."""
        if _members(self._optimizer) != self._members:
            raise UsageError(
                "the optimizer's groups changed after run.prepare (add_param_group?)",
                "make all groups before run.prepare, or set `update: worker` under sync: in the job file",
            )
        if not fit_name(self._optimizer):
            raise UsageError(
                "the optimizer has step hooks or tensors among its numbers since run.prepare, which servers cannot run",
                "add them before run.prepare, or set `update: worker` under sync: in the job file",
            )

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        if self._on_unfit is not None and self._clock == self._client.base:
            self._on_unfit(self._clock, problem)
        raise UsageError(problem, hint)


def _members(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(one) for group in optimizer.param_groups for one in group["params"]]


def wait_points(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Module, set[int]]]:
    """Return the modules whose forward waits for parameters, each with the indices of these."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in index_of:
                holders[index_of[id(parameter)]] = holders.get(index_of[id(parameter)], 0) + 1
    shared = {index for index, count in holders.items() if count > 1}
    found = []
    for module in model.modules():
        below: set[int] = set()
        if type(module) not in PLAIN:
            below = {index_of[id(one)] for one in nn.Module.parameters(module) if id(one) in index_of}
        if below | shared:
            found.append((module, below | shared))
    return found
