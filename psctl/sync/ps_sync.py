"""Strategy `ps` where servers step (`update: server`): gradients leave during backward, new values come back.

A shard is pushed when all gradients in it are ready. `optimizer.step()` pushes what is left, orders the servers' step
with the numbers that the user's groups hold then, and asks for the new values; they are waited for where they are read
(parameter_waits.py). What was pushed is gone, so whoever changes or recomputes a gradient after its push must be
told: that is every check here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from psctl.clock import Clock
from psctl.errors import UsageError
from psctl.ps.dense.server.aggregation import square
from psctl.ps.server_optimizers import fit_name, numbers
from psctl.sync.flat_parameters import Client, FlatParameters
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.parameter_waits import PendingParameters, WaitPoints
from psctl.sync.synchronizer import ExampleWeight, InStep

CURE = (
    "clip with run.clip_grad_norm(...) instead of torch.nn.utils, change gradients only under `with run.accumulate():`,"
    " or set `update: worker` under sync: in the job file (torch's clipping and GradScaler work there)"
)


class ParameterServerSync(InStep):
    """Gradients go to servers that hold the values and step the optimizer.

    Args:
        model: the user's, before its class changes.
        names: of the trainable parameters.
        optimizer: the user's; its groups' numbers travel with each step.
        client: after `start`.
        flat: where parameters lie in the client's buffers.
        share: tells this rank's weight.
        asp: servers apply this rank's gradient alone.
        unfit: told, instead of an error in the script, that servers cannot take the first step; does not return.
    """

    name = "ps"
    update = "server"
    frozen = "the servers hold its values, so they would come back as they were"

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        optimizer: torch.optim.Optimizer,
        client: Client,
        flat: FlatParameters,
        share: ExampleWeight,
        clock: Clock,
        trace: GradientTrace | None = None,
        *,
        asp: bool = False,
        unfit: Callable[[int, str], NoReturn] | None = None,
    ) -> None:
        self.alone, self._unfit = asp, unfit
        self._names, self._optimizer, self._client, self._flat = names, optimizer, client, flat
        self._share, self._time, self._trace = share, clock, trace
        self._clock = client.base
        self._scale: float | None = None
        self._pushed: set[int] = set()
        self._as_pushed: dict[int, tuple[torch.Tensor, int]] = {}  # place -> gradient and its version then
        self._members = [id(one) for group in optimizer.param_groups for one in group["params"]]
        self._arrivals = PendingParameters(client, flat)
        self._points = WaitPoints(model, flat.parameters, self._arrivals)
        self._watch = GradientHooks(
            names, flat.parameters, flat.members, ready=self._push, fired=self._fired, refuse=self._refuse
        )

    @property
    def sync_seconds(self) -> float:
        return self._client.seconds_waiting

    @property
    def under_way_seconds(self) -> float:
        return self._client.seconds_under_way

    @property
    def bytes_moved(self) -> int:
        return self._client.bytes_moved

    @property
    def staleness(self) -> int:
        return self._arrivals.staleness

    @property
    def doing(self) -> str:
        return self._client.doing

    def accumulate(self) -> AbstractContextManager[None]:
        return self._watch.paused()

    def wait(self) -> None:
        self._arrivals.settle()

    def land(self) -> None:
        self._arrivals.land()

    def detached(self) -> AbstractContextManager[None]:
        return self._points.detached()

    def clip(self, max_norm: float) -> torch.Tensor:
        self._check()
        self._push_rest()
        if self.alone:  # what is applied is this rank's own gradient
            there = [one.grad for one in self._flat.parameters if one.grad is not None]
            squares = {index: square(gradient) for index, gradient in enumerate(there)}
        else:
            squares = self._client.norms(self._clock)
        norm = sum(squares[index] for index in sorted(squares)) ** 0.5
        self._scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(norm, dtype=self._flat.parameters[0].dtype)

    def step(self, original: Callable[[], Any], save: bool) -> Any:
        self._check()
        self._still_fit()
        self._push_rest()
        self._client.step(self._clock, numbers(self._optimizer), self._scale, save)
        self._client.pull(self._clock + 1)
        self._clock += 1
        self._scale = None
        self._pushed.clear()
        self._as_pushed.clear()
        self._watch.next_round()
        self._watch.outstanding = False
        self._share.sent()
        self._arrivals.expect(self._clock)
        if self._trace is not None:
            self._trace.flush()

    def save_late(self, step: int) -> None:
        self._client.save(self._clock)

    def leave(self, step: int, state: Callable[[], bytes]) -> None:
        self._client.put_aside(step, state())

    def left(self, step: int) -> bytes:
        return self._client.aside(step)

    def close(self, reason: str, *, failed: bool) -> None:
        self._watch.close()
        self._points.remove()
        if not failed:
            self._client.settle()
        self._client.close(reason)

    def _fired(self, place: int) -> None:
        if self._trace is not None:
            self._trace("gradient", clock=self._clock, parameter=self._names[place])
        if self._scale is not None:
            raise UsageError(
                f"a backward after run.clip_grad_norm() reached parameter {self._names[place]}, whose joint gradient "
                "was already measured",
                "clip after the last backward of a step, just before optimizer.step()",
            )
        gradient = self._flat.parameters[place].grad
        assert gradient is not None, "torch calls the hook when it is there"
        self._as_pushed[place] = (gradient, gradient._version)

    def _push(self, shard: int) -> None:
        present = self._flat.fill(self._client.sending(self._clock), shard)
        self._client.push(self._clock, shard, present, self._share.weight())
        self._pushed.add(shard)

    def _push_rest(self) -> None:
        for shard in reversed(range(len(self._flat.shards))):
            if shard not in self._pushed:
                self._push(shard)
        for place, parameter in enumerate(self._flat.parameters):
            if parameter.grad is not None:
                self._as_pushed.setdefault(place, (parameter.grad, parameter.grad._version))

    def _check(self) -> None:
        """Raise when a gradient is not what was pushed."""
        for place, (gradient, version) in self._as_pushed.items():
            if not any(shard in self._pushed for shard in self._flat.shards_of[place]):
                continue
            now = self._flat.parameters[place].grad
            if now is not gradient or gradient._version != version:
                self._refuse(
                    f"the gradient of parameter {self._names[place]} changed after it was pushed to the servers "
                    "(clipping, unscaling, zero_grad or a write between backward and optimizer.step())",
                    CURE,
                )

    def _refuse(self, what: str, cure: str) -> NoReturn:
        if self._unfit is not None and self._clock == self._client.base:
            self._unfit(self._clock, what)
        raise UsageError(what, cure)

    def _still_fit(self) -> None:
        members = [id(one) for group in self._optimizer.param_groups for one in group["params"]]
        if members != self._members:
            raise UsageError(
                "the optimizer's groups changed after run.prepare (add_param_group?)",
                "make all groups before run.prepare, or set `update: worker` under sync: in the job file",
            )
        if not fit_name(self._optimizer):
            raise UsageError(
                "the optimizer has step hooks or tensors among its numbers since run.prepare, which servers cannot run",
                "add them before run.prepare, or set `update: worker` under sync: in the job file",
            )
