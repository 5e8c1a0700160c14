"""`period: H`: every rank takes H steps alone, then all go on from the joint change of their values.

    theta                       the same on every rank
    H steps of each rank's own optimizer, by its own gradients: theta_i
    delta = mean over ranks, by examples, of theta - theta_i              (the one thing that travels)
    theta <- theta - delta, or: the outer optimizer's step with delta as its gradient

Theory. One exchange for H steps, so bytes fall by H and so does the share of time that waits for the network (local
SGD; McMahan and others 2017, Stich 2019). Without an outer optimizer this averages the values. With one, the mean
change counts as a gradient of a slower optimizer: with Nesterov momentum 0.9 and a rate of 0.7 it is DiLoCo (Douillard
and others 2023), which trained with 500 times fewer bytes to nearly the loss of synchronous training. Ranks drift apart
within a period, so H has a price, that grows with the learning rate; it is nothing at H = 1.

Periods end at the steps that H divides, counted from the job's first, and at a run's last one. Between two ends ranks
have different values, so what concerns all happens at an end: checkpoints, stops, the last evaluation. Then a
checkpoint needs nothing of the middle of a period: the values and the outer optimizer's state are rank 0's, equal
everywhere; only the inner optimizers' states are every rank's own, and each rank saves its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from psctl.clock import Clock
from psctl.errors import UsageError
from psctl.sync.allreduce_sync import Reducer
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.synchronizer import AtWorkers, ExampleWeight
from psctl.train_state.training_parts import load_state, state_of

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the outer optimizer over the values that all ranks share."""

PLACE = "outer"
"""Where its state lies in a checkpoint: outer/NAME/KEY."""


class SingleRankReducer:
    """A reducer of one rank: its mean is what it has."""

    bytes_moved = 0
    doing = "compute"
    buckets: Sequence[Sequence[int]] = ()

    def send(self, bucket: int, weight: float) -> None:
        return

    def finish(self) -> None:
        return

    def close(self, reason: str, *, failed: bool) -> None:
        return


class LocalSgdSync(AtWorkers):
    """Steps alone, and joins at the ends of periods.

    Args:
        name: the strategy's name.
        trainable: by name; with the same values on every rank.
        reducer: makes the mean, in `.grad`.
        share: tells how many examples a step had, here and everywhere.
        period: H.
        step: steps of the job that were done before.
        world: number of ranks.
        outer: makes the outer optimizer; None: values are averaged.
    """

    update = "worker"
    frozen = ""
    staleness = 0
    apart = True
    alone = False

    def __init__(
        self,
        name: str,
        trainable: Mapping[str, nn.Parameter],
        reducer: Reducer,
        share: ExampleWeight,
        clock: Clock,
        *,
        period: int,
        step: int,
        world: int,
        outer: OptimizerFactory | None = None,
        trace: GradientTrace | None = None,
    ) -> None:
        self.name, self.period = name, period
        self.sync_seconds = self.under_way_seconds = 0.0  # nothing leaves beside a backward
        self._parameters = list(trainable.values())
        self._reducer, self._share, self._clock, self._trace = reducer, share, clock, trace
        self._step, self._world = step, world
        self._mine = self._together = 0  # examples of this period
        self._open = False  # steps were taken that are not joint
        with torch.no_grad():
            self._shared = {name: nn.Parameter(one.detach().clone()) for name, one in trainable.items()}
        self._outer = _made(outer, list(self._shared.values())) if outer is not None else None

    @property
    def bytes_moved(self) -> int:
        return self._reducer.bytes_moved

    @property
    def doing(self) -> str:
        return self._reducer.doing

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is sent before a period's end

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self, original: Callable[[], Any], save: bool) -> Any:
        result = original()
        self._step += 1
        self._open = True
        self._mine += self._share.mine
        self._together += self._share.together
        if save or self._step % self.period == 0:
            self._join()
        return result

    def finish(self) -> None:
        if self._open:
            self._join()

    def close(self, reason: str, *, failed: bool) -> None:
        self._reducer.close(reason, failed=failed)

    # ---- checkpoints ----

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return state_of(self._outer, self._shared, PLACE) if self._outer is not None else ({}, {})

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the outer optimizer its state back."""
        if self._outer is not None:
            load_state(self._outer, self._shared, plain, tensors, PLACE)

    # ---- inside ----

    def _weight(self) -> float:
        """Return this rank's part of the mean times the number of ranks; 1 where shares are equal or unknown."""
        if self._together == 0 or self._mine * self._world == self._together:
            return 1.0
        return self._mine * self._world / self._together

    def _join(self) -> None:
        began = self._clock.now()
        own = [parameter.grad for parameter in self._parameters]
        shared = list(self._shared.values())
        with torch.no_grad():
            for parameter, one in zip(self._parameters, shared, strict=True):
                parameter.grad = one - parameter
            weight = self._weight()
            for bucket in reversed(range(len(self._reducer.buckets))):
                self._reducer.send(bucket, weight)
            self._reducer.finish()
            for parameter, one in zip(self._parameters, shared, strict=True):
                one.grad = parameter.grad
                if self._outer is None:
                    one.sub_(_there(one.grad))
        if self._outer is not None:
            self._outer.step()
        with torch.no_grad():
            for parameter, one, gradient in zip(self._parameters, shared, own, strict=True):
                parameter.copy_(one)
                parameter.grad, one.grad = gradient, None
        self._mine = self._together = 0
        self._open = False
        self.sync_seconds += self._clock.now() - began
        if self._trace is not None:
            self._trace.flush()


def _there(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "every parameter was given one"
    return gradient


def _made(factory: OptimizerFactory, shared: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what the factory makes.

    Raises:
        UsageError: it is no optimizer of these parameters; the script's fault.
    """
    made = factory(shared)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"run.prepare: outer= made a {type(made).__name__}, no torch.optim.Optimizer", _CURE)
    held = {id(one) for group in made.param_groups for one in group["params"]}
    if held != {id(one) for one in shared}:
        raise UsageError("run.prepare: outer= made an optimizer of other parameters than those it was given", _CURE)
    return made


_CURE = "such as outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
