"""Hooks on parameters that report, during backward, buckets whose gradients are all computed, and its end.

torch calls a post-accumulate hook when a parameter's gradient of this backward is in `.grad`. A *round* is what is sent
together: the gradients of one backward where workers step, those of one clock where servers step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch import nn

from psctl.errors import UsageError


def raise_usage(problem: str, hint: str) -> NoReturn:
    """Raise UsageError."""
    raise UsageError(problem, hint)


class AutogradEngine(Protocol):
    """The method of torch's autograd engine that has no types there."""

    def queue_callback(self, call: Callable[[], None], /) -> None: ...


class GradientHooks:
    """Reports each bucket whose gradients are all computed.

    Args:
        names: of the trainable parameters, for messages.
        parameters: the trainable parameters.
        buckets: for each bucket the indices (into `parameters`) of those that have a part in it.
        on_bucket: called with a bucket's index when all its gradients are computed; on the thread that runs backward.
        on_gradient: called with a parameter's index when its gradient is computed, before `on_bucket`.
        on_backward_end: called when a backward has computed all its gradients (not under `paused`); None: never.
        per_backward: a round is one backward; else it ends with `next_round`.
        on_error: called with the problem and a hint where a gradient was computed twice in a round; raises.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        on_bucket: Callable[[int], None] = lambda _: None,
        on_gradient: Callable[[int], None] = lambda _: None,
        on_backward_end: Callable[[], None] | None = None,
        per_backward: bool = False,
        on_error: Callable[[str, str], NoReturn] = raise_usage,
    ) -> None:
        self._names = names
        self._buckets: Sequence[Sequence[int]] = ()
        self.divide(buckets)
        self._on_bucket, self._on_gradient, self._on_backward_end = on_bucket, on_gradient, on_backward_end
        self._per_backward, self._on_error = per_backward, on_error
        self._paused = False
        self.holds_last = False
        """Whether the last bucket of a round is not reported: the caller sends it with the rest."""
        self._task = -1  # the backward whose end is reported
        self.next_round()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._computed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def divide(self, buckets: Sequence[Sequence[int]]) -> None:
        """Report these buckets from the next round on."""
        if buckets is self._buckets:
            return
        self._buckets = buckets
        self._sizes = [len(bucket) for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in self._names]
        for bucket, members in enumerate(buckets):
            for index in members:
                self._buckets_of[index].append(bucket)

    def next_round(self) -> None:
        """Start a round: no gradient of it was computed yet."""
        self.outstanding = False
        """Whether gradients were computed that have not been sent."""
        self._reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up without being sent."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._seen: set[int] = set()
        self._left = list(self._sizes)
        self._complete = 0  # buckets

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {self._names[index]} has a sparse gradient, which cannot be summed",
                "make the embedding with sparse=False, or use psctl.nn.SparseEmbedding, whose rows servers hold",
            )
        self.outstanding = True
        if self._paused:
            return
        if self._on_backward_end is not None:
            self._report_end()
        if index in self._seen:
            self._on_error(_twice(self._names[index]), _TWICE_HINT)
        self._seen.add(index)
        self._on_gradient(index)
        for bucket in self._buckets_of[index]:
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                self._complete += 1
                if not (self.holds_last and self._complete == len(self._sizes)):
                    self._on_bucket(bucket)

    def _report_end(self) -> None:
        """Have the autograd engine call `on_backward_end` after the backward that runs now; once a backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self._per_backward:
                self._reset()
            assert self._on_backward_end is not None, "it is asked for only with one"
            engine: AutogradEngine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._on_backward_end)


def _twice(name: str) -> str:
    return (
        f"the gradient of parameter {name} was computed twice in one step: it was already sent "
        "(a second backward before optimizer.step(), or a backward whose step was left out)"
    )


_TWICE_HINT = (
    "put every backward but the last of a step under `with run.accumulate():`, call optimizer.step() after each last "
    "one, or set `update: worker` under sync: in the job file"
)
