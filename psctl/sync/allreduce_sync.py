"""Writes the averaged gradient into `.grad` at the end of each backward, for optimizers that step on workers.

A reducer sums buckets: on servers (`update: worker`) or by a collective. Buckets are sent while backward still runs;
when it ends the rest is sent, and the mean is written into `.grad`, where any optimizer, clipping and GradScaler find
it. A parameter that had no gradient on any rank keeps its `.grad`. Gradients that several backwards add up are summed
as they are: a part that was averaged before does not change, because the weights of all ranks sum to their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from psctl.client.server_waits import InFlightTimer
from psctl.clock import Clock
from psctl.process.step_ring import StepRecorder
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.replacement_state import ReplacementState
from psctl.sync.synchronizer import ByteMover, ExampleWeight, Synchronizer
from psctl.types import State


class Reducer(ByteMover, Protocol):
    """Sums gradients over all ranks, bucket by bucket."""

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """For each bucket the indices of the parameters that have a part in it; another object when they change."""

    def send(self, bucket: int, weight: float) -> None:
        """Send a bucket's gradients as `.grad` holds them (None: no gradient)."""

    def finish(self) -> None:
        """Wait for the sums of all buckets, which were all sent, and write the mean into `.grad`."""

    def close(self, reason: str, *, failed: bool) -> None:
        """Release connections or groups."""


class AllReduceSync(Synchronizer):
    """Averages gradients at the end of each backward outside `accumulate`.

    Args:
        name: the strategy's name.
        trainable: the trainable parameters by name, in the model's order.
        reducer: sums.
        weight: of this rank's gradient.
        clock: measures waits.
        replacement: the state for workers that are replaced while this one trains; None: none are.
        on_end: called at the end of the script, when no sum will be made any more.
        spans: records the times of steps.
        after_step: called when the optimizer has stepped.
        tuning: returns the progress of the choice of a bucket size.
    """

    def __init__(
        self, name: str, trainable: dict[str, nn.Parameter], reducer: Reducer, weight: ExampleWeight, clock: Clock,
        trace: GradientTrace | None = None, replacement: ReplacementState | None = None,
        on_end: Callable[[], object] = lambda: None, spans: StepRecorder | None = None,
        after_step: Callable[[], object] = lambda: None, tuning: Callable[[], State] = dict,
    ) -> None:  # fmt: skip
        super().__init__(name, list(trainable.values()), reducer)
        self._spans = spans or StepRecorder()
        self._replacement, self._on_end, self._after_step, self._tuning = replacement, on_end, after_step, tuning
        self.recovers_sums = replacement is not None
        self._names = list(trainable)
        self._reducer, self._weight, self._clock, self._trace = reducer, weight, clock, trace
        self._in_flight = InFlightTimer(clock)
        self._sent: set[int] = set()
        self._rounds = 0
        self._hooks = GradientHooks(
            self._names, self._parameters, reducer.buckets,
            on_bucket=self._send, on_gradient=self._on_gradient, on_backward_end=self._reduce, per_backward=True,
        )  # fmt: skip

    @property
    def in_flight_seconds(self) -> float:
        return self._in_flight.seconds

    def accumulate(self) -> AbstractContextManager[None]:
        return self._hooks.paused()

    def hold_last_bucket(self, before: Callable[[], object]) -> None:
        super().hold_last_bucket(before)
        self._hooks.holds_last = True

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        self._reduce()
        return super().clip_grad_norm(max_norm)

    def step(self, original: Callable[[], object], save: bool) -> object:
        self._reduce()
        if self._replacement is not None:
            self._replacement.on_step_end()
        stepped = original()
        self._after_step()
        return stepped

    def checkpoint_state(self) -> tuple[State, dict[str, torch.Tensor]]:
        tuning = self._tuning()
        return ({"bucket": tuning} if tuning else {}), {}

    def finish(self) -> None:
        self._on_end()

    def store_rank_state(self, step: int, make_state: Callable[[], bytes]) -> None:
        if self._replacement is not None:
            self._replacement.note(step, make_state)

    def fetch_rank_state(self, step: int) -> tuple[int, bytes]:
        assert self._replacement is not None, "only such workers are replaced while others train"
        assert self._replacement.taken is not None, "it was taken when the reducer was made"
        return self._replacement.taken

    def close(self, reason: str, *, failed: bool) -> None:
        self._hooks.close()
        self._reducer.close(reason, failed=failed)

    def _on_gradient(self, index: int) -> None:
        self._spans.gradient()
        if self._trace is not None:
            self._trace("gradient", clock=self._rounds, parameter=self._names[index])

    def _send(self, bucket: int) -> None:
        self._sent.add(bucket)
        self._in_flight.start()
        self._reducer.send(bucket, self._weight.weight)

    def _reduce(self) -> None:
        """Average the gradients that are not averaged yet: a backward's, or accumulated ones."""
        if not self._hooks.outstanding:
            return
        self.before_last_bucket()
        began, at = self._clock.now(), self._spans.now()
        for bucket in reversed(range(len(self._reducer.buckets))):
            if bucket not in self._sent:
                self._send(bucket)
        with torch.no_grad():
            self._reducer.finish()
        self._in_flight.stop()
        self._sent.clear()
        self._hooks.divide(self._reducer.buckets)
        self._hooks.next_round()
        self._weight.mark_sent()
        self._rounds += 1
        self._sync_seconds += self._clock.now() - began
        self._spans.synchronized(at)
        if self._trace is not None:
            self._trace.flush()
