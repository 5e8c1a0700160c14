"""Sees gradients become ready one by one during backward, and tells when a bucket is complete and when backward ends.

torch calls a post-accumulate hook when a parameter's gradient of this backward is in `.grad`. A *round* is what is sent
together: one backward where the joint mean must stand in `.grad` after it, one clock where servers step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from psctl.errors import NotInThisVersion, UsageError


def raise_usage(what: str, cure: str) -> NoReturn:
    """Raise UsageError."""
    raise UsageError(what, cure)


class GradientHooks:
    """Counts gradients down to whole buckets.

    Args:
        names: of the trainable parameters, for messages.
        parameters: the trainable parameters.
        buckets: for each bucket the places (into `parameters`) of those that have a part in it.
        ready: called with a bucket's index when all its gradients are there; on the thread that runs backward.
        fired: called with a parameter's place when its gradient is there, before `ready`.
        ended: called when a backward has computed all its gradients (not under `paused`); None: never.
        per_backward: a round ends with its backward; else with `next_round`.
        refuse: told what the script did wrong, and the cure, where a gradient came twice in a round; raises.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        ready: Callable[[int], None],
        fired: Callable[[int], None] = lambda _: None,
        ended: Callable[[], None] | None = None,
        per_backward: bool = False,
        refuse: Callable[[str, str], NoReturn] = raise_usage,
    ) -> None:
        self._names, self._parameters = names, parameters
        self._sizes = [len(bucket) for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in parameters]
        for index, bucket in enumerate(buckets):
            for place in bucket:
                self._buckets_of[place].append(index)
        self._ready, self._fired, self._ended = ready, fired, ended
        self._per_backward, self._refuse = per_backward, refuse
        self._paused = False
        self.outstanding = False
        """Gradients were added that no round has sent."""
        self._task = -1  # the backward whose end was asked for
        self.next_round()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._computed, place))  # type: ignore[no-untyped-call]
            for place, parameter in enumerate(parameters)
        ]

    def next_round(self) -> None:
        """Begin anew: no gradient of the next round is there yet."""
        self._seen: set[int] = set()
        self._left = list(self._sizes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up without being sent."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _computed(self, place: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise NotInThisVersion(
                f"a sparse gradient (parameter {self._names[place]})", "make the embedding with sparse=False"
            )
        self.outstanding = True
        if self._paused:
            return
        if self._ended is not None:
            self._ask_for_end()
        if place in self._seen:
            self._refuse(_twice(self._names[place]), _TWICE_CURE)
        self._seen.add(place)
        self._fired(place)
        for bucket in self._buckets_of[place]:
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                self._ready(bucket)

    def _ask_for_end(self) -> None:
        """Have the engine call `ended` when the backward that runs now is through; once a backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self._per_backward:
                self.next_round()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._ended)


def _twice(name: str) -> str:
    return (
        f"the gradient of parameter {name} was computed twice in one step: it was already on its way to the servers "
        "(a second backward before optimizer.step(), or a backward whose step was left out)"
    )


_TWICE_CURE = (
    "put every backward but the last of a step under `with run.accumulate():`, call optimizer.step() after each last "
    "one, or set `update: worker` under sync: in the job file"
)
