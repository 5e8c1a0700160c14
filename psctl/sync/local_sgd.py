"""`period: H` (local SGD, DiLoCo): each rank takes H steps alone, then all apply the mean change of their values.

    theta                       the same on every rank
    H steps of each rank's own optimizer, by its own gradients: theta_i
    delta = mean over ranks, by examples, of theta - theta_i              (the only bytes that are sent)
    theta <- theta - delta, or: the outer optimizer's step with delta as its gradient

Theory. One exchange for H steps, so bytes fall by H, and so does the share of time spent waiting for the network (local
SGD; McMahan and others 2017, Stich 2019). Without an outer optimizer this averages the values. With one, the mean
change is the gradient of a slower optimizer: with Nesterov momentum 0.9 and a rate of 0.7 it is DiLoCo (Douillard and
others 2023), which trained with 500 times fewer bytes to nearly the loss of synchronous training. Ranks drift apart
within a period, so H has a price, which grows with the learning rate; there is none at H = 1.

Periods end at the steps that H divides, counted from the job's first, and at a run's last one. Between two ends ranks
have different values, so checkpoints, stops and the last evaluation happen at an end. A checkpoint then has no state
within a period: the values and the outer optimizer's state are rank 0's, equal on all ranks; each rank saves the state
of its inner optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from psctl.clock import Clock
from psctl.errors import UsageError
from psctl.process.step_ring import StepRecorder
from psctl.sync.allreduce_sync import Reducer
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.synchronizer import ExampleWeight, NoByteMover, Synchronizer, relative_weight
from psctl.train_state.training_parts import load_state, state_of
from psctl.types import State, StateValue

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the outer optimizer of the values that all ranks share."""

PREFIX = "outer"
"""Prefix of its state in a checkpoint: outer/NAME/KEY."""


class SingleRankReducer(NoByteMover):
    """The reducer of one rank: the mean is its own gradient."""

    buckets: Sequence[Sequence[int]] = ()

    def send(self, bucket: int, weight: float) -> None:
        return

    def finish(self) -> None:
        return

    def close(self, reason: str, *, failed: bool) -> None:
        return


class LocalSgdSync(Synchronizer):
    """Lets each rank step alone, and averages the changes at the ends of periods.

    Args:
        name: the strategy's name.
        trainable: by name; with the same values on every rank.
        reducer: averages `.grad` over the ranks.
        weight: counts the examples of a step, here and on all ranks.
        period: H.
        step: steps of the job before this run.
        world: number of ranks.
        outer: makes the outer optimizer; None: values are averaged.
    """

    has_local_optimizer = True

    def __init__(
        self, name: str, trainable: Mapping[str, nn.Parameter], reducer: Reducer, weight: ExampleWeight,
        clock: Clock, *, period: int, step: int, world: int, outer: OptimizerFactory | None = None,
        trace: GradientTrace | None = None, spans: StepRecorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, list(trainable.values()), reducer)
        self.period = period
        self._spans = spans or StepRecorder()
        self._reducer, self._weight, self._clock, self._trace = reducer, weight, clock, trace
        self._step, self._world = step, world
        self._own_examples = self._all_examples = 0  # of this period
        self._open = False  # whether steps were taken since the last period's end
        with torch.no_grad():
            self._shared = {name: nn.Parameter(one.detach().clone()) for name, one in trainable.items()}
        self._outer = _make_outer(outer, list(self._shared.values())) if outer is not None else None

    def step(self, original: Callable[[], object], save: bool) -> object:
        result = original()
        self._step += 1
        self._open = True
        self._own_examples += self._weight.own_examples
        self._all_examples += self._weight.all_examples
        if save or self._step % self.period == 0:
            self._end_period()
        return result

    def finish(self) -> None:
        if self._open:
            self._end_period()

    def close(self, reason: str, *, failed: bool) -> None:
        self._reducer.close(reason, failed=failed)

    def checkpoint_state(self) -> tuple[State, dict[str, torch.Tensor]]:
        return state_of(self._outer, self._shared, PREFIX)

    def load(self, plain: Mapping[str, StateValue], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the outer optimizer's state."""
        load_state(self._outer, self._shared, plain, tensors, PREFIX)

    def _end_period(self) -> None:
        began, at = self._clock.now(), self._spans.now()
        own = [parameter.grad for parameter in self._parameters]
        shared = list(self._shared.values())
        with torch.no_grad():
            for parameter, one in zip(self._parameters, shared, strict=True):
                parameter.grad = one - parameter
            weight = relative_weight(self._own_examples, self._all_examples, self._world)
            for bucket in reversed(range(len(self._reducer.buckets))):
                self._reducer.send(bucket, weight)
            self._reducer.finish()
            for parameter, one in zip(self._parameters, shared, strict=True):
                assert parameter.grad is not None, "set above"
                one.grad = parameter.grad
                if self._outer is None:
                    one.sub_(one.grad)
        if self._outer is not None:
            self._outer.step()
        with torch.no_grad():
            for parameter, one, gradient in zip(self._parameters, shared, own, strict=True):
                parameter.copy_(one)
                parameter.grad, one.grad = gradient, None
        self._own_examples = self._all_examples = 0
        self._open = False
        self._sync_seconds += self._clock.now() - began
        self._spans.synchronized(at)
        if self._trace is not None:
            self._trace.flush()


def _make_outer(factory: OptimizerFactory, shared: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer.

    Raises:
        UsageError: the factory made no optimizer of these parameters; the script's fault.
    """
    made = factory(shared)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"run.prepare: outer= made a {type(made).__name__}, no torch.optim.Optimizer", _CURE)
    held = {id(one) for group in made.param_groups for one in group["params"]}
    if held != {id(one) for one in shared}:
        raise UsageError("run.prepare: outer= made an optimizer of other parameters than those it was given", _CURE)
    return made


_CURE = "such as outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
