"""The joint mean gradient stands in `.grad` after backward: what any optimizer, clipping and GradScaler then work on.

A reducer sums buckets: over servers (`update: worker`) or by a collective. Buckets leave while
backward still runs; when it ends the rest leaves, and the mean is written into `.grad`. A parameter that no rank had a
gradient for keeps its `.grad`. Gradients that several backwards add up are summed as they stand: what was joint before
stays so, for the weights of all ranks sum to their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from psctl.client.overlap_timer import UnderWay
from psctl.clock import Clock
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.synchronizer import AtWorkers, ExampleWeight, InStep


class Reducer(Protocol):
    """Sums gradients over all ranks, bucket by bucket."""

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """For each bucket the places of the parameters that have a part in it."""

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""

    @property
    def doing(self) -> str:
        """What is waited for, for people."""

    def send(self, bucket: int, weight: float) -> None:
        """Send a bucket's gradients, as they stand in `.grad` (None: no gradient)."""

    def finish(self) -> None:
        """Wait for the sums of all buckets, which were all sent, and write the mean into `.grad`."""

    def close(self, reason: str, *, failed: bool) -> None:
        """Let go of connections or groups."""


class AllReduceSync(AtWorkers, InStep):
    """Makes gradients joint at the end of each backward outside `accumulate`.

    Args:
        name: the strategy's name.
        names: of the trainable parameters.
        parameters: the trainable parameters.
        reducer: sums.
        share: tells this rank's weight.
        clock: to tell how long waits take.
    """

    update = "worker"
    frozen = ""
    staleness = 0

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        reducer: Reducer,
        share: ExampleWeight,
        clock: Clock,
        trace: GradientTrace | None = None,
    ) -> None:
        self.name = name
        self.sync_seconds = 0.0
        self._names, self._parameters = names, parameters
        self._reducer, self._share, self._clock, self._trace = reducer, share, clock, trace
        self._under_way = UnderWay(clock)
        self._sent: set[int] = set()
        self._rounds = 0
        self._watch = GradientHooks(
            names, parameters, reducer.buckets,
            ready=self._send, fired=self._fired, ended=self._join, per_backward=True,
        )  # fmt: skip

    @property
    def under_way_seconds(self) -> float:
        return self._under_way.seconds

    @property
    def bytes_moved(self) -> int:
        return self._reducer.bytes_moved

    @property
    def doing(self) -> str:
        return self._reducer.doing

    def accumulate(self) -> AbstractContextManager[None]:
        return self._watch.paused()

    def clip(self, max_norm: float) -> torch.Tensor:
        self._settle()
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self, original: Callable[[], Any], save: bool) -> Any:
        self._settle()
        return original()

    def close(self, reason: str, *, failed: bool) -> None:
        self._watch.close()
        self._reducer.close(reason, failed=failed)

    def _settle(self) -> None:
        """Make joint what was only accumulated: every backward since the last step was under `accumulate`."""
        if self._watch.outstanding:
            self._join()

    def _fired(self, place: int) -> None:
        if self._trace is not None:
            self._trace("gradient", clock=self._rounds, parameter=self._names[place])

    def _send(self, bucket: int) -> None:
        self._sent.add(bucket)
        self._under_way.begin()
        self._reducer.send(bucket, self._share.weight())

    def _join(self) -> None:
        if not self._watch.outstanding:
            return
        began = self._clock.now()
        for bucket in reversed(range(len(self._reducer.buckets))):
            if bucket not in self._sent:
                self._send(bucket)
        with torch.no_grad():
            self._reducer.finish()
        self._under_way.end()
        self._sent.clear()
        self._watch.next_round()
        self._watch.outstanding = False
        self._share.sent()
        self._rounds += 1
        self.sync_seconds += self._clock.now() - began
        if self._trace is not None:
            self._trace.flush()
