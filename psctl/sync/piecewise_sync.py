"""The base of synchronizers that step the user's optimizer piece by piece, on servers or on the ranks' parts.

Gradients are sent while backward still runs, and `optimizer.step()` has the holders of the pieces step with the groups'
numbers of this step. Afterwards the new values are on their way, and the model waits for them (value_waits.py). So a
gradient must not change between its sending and the step, and `.grad` keeps this rank's own.

With `step_in_backward` some buckets are stepped before the others are sent. Then the groups' numbers are those at the
first bucket, and the norm of all gradients, which clipping needs, is not known in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from psctl.errors import UsageError
from psctl.process.step_ring import StepRecorder
from psctl.ps.server_optimizers import fit_name, numbers
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.synchronizer import ByteMover, ExampleWeight, Synchronizer
from psctl.sync.value_waits import AwaitedValues, wait_hooks
from psctl.types import Number

HINT = (
    "clip with run.clip_grad_norm(...) instead of torch.nn.utils, change gradients only under `with run.accumulate():`,"
    " or set `update: worker` under sync: in the job file (torch's clipping and GradScaler work there)"
)


class PieceHolders(NamedTuple):
    """The processes that hold the pieces and step them, for messages."""

    pushed: str
    """How gradients get there."""
    run: str
    """That they cannot run an optimizer."""


class TrainedParts(NamedTuple):
    """The user's objects that are stepped piece by piece."""

    model: nn.Module
    """Before its class changes."""
    names: Sequence[str]
    """Of the trainable parameters."""
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer


class PiecewiseSync(Synchronizer, ABC):
    """Sends gradients bucket by bucket during backward, and has their holders step.

    Args:
        name: the strategy's name.
        parts: what is trained; the numbers of the optimizer's groups travel with each step.
        buckets: for each bucket the indices of the parameters that have a part in it.
        mover: moves the bytes.
        pending: the parameters that wait for new values.
        holders: for messages.
        weight: of this rank's gradient.
        first_step: the step that the next one follows.
        on_unfit: called with the step and the problem when the first step cannot be made piece by piece; does not
            return. None: the script gets an error.
        spans: records the times of steps.
        in_backward: some buckets are stepped before the others are sent.
    """

    def __init__(
        self, name: str, parts: TrainedParts, buckets: Sequence[Sequence[int]], mover: ByteMover,
        pending: AwaitedValues, holders: PieceHolders, weight: ExampleWeight, first_step: int,
        on_unfit: Callable[[int, str], NoReturn] | None, trace: GradientTrace | None, spans: StepRecorder,
        *, in_backward: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, parts.parameters, mover)
        self._names, self._optimizer, self._holders = parts.names, parts.optimizer, holders
        self._weight, self._trace, self._spans, self._on_unfit = weight, trace, spans, on_unfit
        self._clock = self._first_step = first_step
        self._buckets = buckets
        self._scale: float | None = None
        self._in_backward = in_backward
        self._groups: Sequence[dict[str, Number]] | None = None  # as they were at the first bucket, if that counts
        self._pushed: set[int] = set()
        self._push_began = 0  # when the first of them was
        self._as_pushed: dict[int, tuple[torch.Tensor, int]] = {}  # parameter -> gradient and its version then
        self._buckets_of: list[list[int]] = [[] for _ in parts.parameters]
        for bucket, members in enumerate(buckets):
            for index in members:
                self._buckets_of[index].append(bucket)
        self._members = _members(parts.optimizer)
        self._wait_hooks = wait_hooks(parts.model, parts.parameters, pending)
        self._hooks = GradientHooks(
            parts.names, parts.parameters, buckets,
            on_bucket=self._push, on_gradient=self._on_gradient, on_error=self._refuse,
        )  # fmt: skip

    # ---- of each way to step ----

    @abstractmethod
    def _send(self, bucket: int, weight: float) -> None:
        """Send a bucket's gradients of this step with this weight."""

    @abstractmethod
    def _norm(self) -> float:
        """Return the 2-norm of the joint gradient; all buckets were sent."""

    @abstractmethod
    def _step_pieces(self, save: bool) -> None:
        """Have the holders step, with the gradient times `_scale` where it is given; all buckets were sent."""

    # ---- the step ----

    def accumulate(self) -> AbstractContextManager[None]:
        return self._hooks.paused()

    def hold_last_bucket(self, before: Callable[[], object]) -> None:
        super().hold_last_bucket(before)
        self._hooks.holds_last = True

    def without_hooks(self) -> AbstractContextManager[None]:
        return self._wait_hooks.detached()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self._in_backward:
            raise UsageError(
                "run.clip_grad_norm() needs the norm of all gradients, but sync.step_in_backward steps parameters "
                "before all gradients are computed",
                "leave out step_in_backward under sync: in the job file, or do not clip",
            )
        self._check_gradients()
        self._push_rest()
        norm = self._norm()
        self._scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(norm, dtype=self._parameters[0].dtype)

    def step(self, original: Callable[[], object], save: bool) -> object:
        self._check_gradients()
        self._check_optimizer()
        self._push_rest()
        self._step_pieces(save)
        self._clock += 1
        self._scale = self._groups = None
        self._pushed.clear()
        self._as_pushed.clear()
        self._hooks.next_round()
        if self._trace is not None:
            self._trace.flush()
        return None

    def close(self, reason: str, *, failed: bool) -> None:
        self._hooks.close()
        self._wait_hooks.remove()

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
        gradient = self._parameters[index].grad
        assert gradient is not None, "torch calls the hook after it is computed"
        self._as_pushed[index] = (gradient, gradient._version)

    def _push(self, bucket: int) -> None:
        if not self._pushed:
            self._push_began = self._spans.now()
            self._groups = numbers(self._optimizer) if self._in_backward else None
        self._send(bucket, self._weight.weight)
        self._pushed.add(bucket)

    def _push_rest(self) -> None:
        self.before_last_bucket()
        for bucket in reversed(range(len(self._buckets))):
            if bucket not in self._pushed:
                self._push(bucket)
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._as_pushed.setdefault(index, (parameter.grad, parameter.grad._version))

    def _check_gradients(self) -> None:
        """Raise when a gradient is not what was pushed."""
        for index, (gradient, version) in self._as_pushed.items():
            if self._pushed.isdisjoint(self._buckets_of[index]):
                continue
            now = self._parameters[index].grad
            if now is not gradient or gradient._version != version:
                self._refuse(
                    f"the gradient of parameter {self._names[index]} changed after it was {self._holders.pushed} "
                    "(clipping, unscaling, zero_grad or a write between backward and optimizer.step())",
                    HINT,
                )

    def _check_optimizer(self) -> None:
        """Raise when the optimizer cannot be run piece by piece any more."""
        if _members(self._optimizer) != self._members:
            raise UsageError(
                "the optimizer's groups changed after run.prepare (add_param_group?)",
                "make all groups before run.prepare, or set `update: worker` under sync: in the job file",
            )
        if not fit_name(self._optimizer):
            raise UsageError(
                "the optimizer has step hooks or tensors among its numbers since run.prepare, which "
                f"{self._holders.run}",
                "add them before run.prepare, or set `update: worker` under sync: in the job file",
            )
        if self._groups is not None and (now := numbers(self._optimizer)) != self._groups:
            raise UsageError(
                f"{_difference(self._groups, now)}, but with sync.step_in_backward parameters are stepped during "
                "backward",
                "change the optimizer's numbers after optimizer.step() or before backward, or leave out "
                "step_in_backward under sync: in the job file",
            )

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        if self._on_unfit is not None and self._clock == self._first_step:
            self._on_unfit(self._clock, problem)
        raise UsageError(problem, hint)


def _difference(before: Sequence[dict[str, Number]], now: Sequence[dict[str, Number]]) -> str:
    """Return the first number of an optimizer's groups that has changed between backward and the step."""
    for group, (old, new) in enumerate(zip(before, now, strict=True)):
        for key in new:
            if old.get(key) != new[key]:
                return f"{key} of the optimizer's group {group} was {old.get(key)} in backward and is {new[key]} now"
    return "the optimizer's numbers have changed since backward"


def _members(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(one) for group in optimizer.param_groups for one in group["params"]]
