"""What the script reported of its steps, until it is sent or printed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from psctl.clock import Clock
from psctl.errors import UsageError
from psctl.job.training_messages import StepReport, WorkerReport
from psctl.sync.synchronizer import Synchronizer
from psctl.worker.training_progress import TrainingProgress


class StepReports:
    """Numbers by step. `add` is the main thread's, `take` any thread's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, tuple[int, float, dict[str, Any]]] = {}  # step -> epoch, weight, metrics
        self.last: dict[str, Any] = {}
        """The newest value of every name, not yet converted."""

    def add(self, step: int, epoch: int, weight: float, numbers: dict[str, Any]) -> None:
        """Note numbers of a step; a later value of a name replaces the earlier one of that step.

        Raises:
            UsageError: a value is not one number; names it.
        """
        held = {name: _hold(name, value) for name, value in numbers.items()}
        with self._lock:
            _, _, metrics = self._steps.setdefault(step, (epoch, weight, {}))
            metrics.update(held)
            self._steps[step] = (epoch, weight, metrics)
            self.last.update(held)

    def take(self) -> list[StepReport]:
        """Return what was noted since the last call, converted to floats."""
        with self._lock:
            steps, self._steps = self._steps, {}
        return [
            StepReport(step, epoch, weight, {name: float(value) for name, value in metrics.items()})
            for step, (epoch, weight, metrics) in sorted(steps.items())
        ]

    def line(self) -> str:
        """Return the newest values as text: "loss 0.31 · accuracy 0.92"."""
        with self._lock:
            last = dict(self.last)
        return " · ".join(f"{name} {float(value):.4g}" for name, value in last.items())


class ReportInterval:
    """What a rank did since its last report. `tell` may be called by any thread.

    Args:
        way: how it synchronises.
        clock: the machine's time.
    """

    def __init__(self, way: Synchronizer, clock: Clock) -> None:
        self._way, self._clock = way, clock
        self._telling = threading.Lock()
        self._told = self._now(0.0)

    def _now(self, examples: float) -> tuple[float, float, float, float, int]:
        way = self._way
        return self._clock.now(), examples, way.sync_seconds, way.under_way_seconds, way.bytes_moved

    def tell(self, send: Callable[[WorkerReport], None], course: TrainingProgress, reports: StepReports) -> None:
        """Send the report of this interval and begin the next, in one act, so that no report overtakes another.

        Args:
            send: hands it to the network.
            course: where the run is.
            reports: numbers of steps.
        """
        with self._telling:
            rested = course.marked  # read first: then all numbers up to that step are in `reports`
            steps = reports.take()
            before, self._told = self._told, self._now(course.examples)
            seconds, done, waited, under_way, moved = (
                now - then for now, then in zip(self._told, before, strict=True)
            )  # fmt: skip
            send(
                WorkerReport(
                    course.step, course.epoch, steps, done, max(0.0, seconds - waited), waited, int(moved),
                    self._way.staleness, max(0.0, under_way - waited), rested,
                )
            )  # fmt: skip


def _hold(name: str, value: Any) -> Any:
    """Keep a number as it is now. One on a GPU is copied there and read later, so that reporting waits for nothing."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"run.report({name}=...): a tensor of shape {tuple(value.shape)}, expected one number",
                "report its mean() or sum()",
            )
        return value.detach().clone() if value.device.type != "cpu" else float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"run.report({name}=...): {type(value).__name__} {value!r:.40}, expected a number", "report numbers only"
        ) from error
