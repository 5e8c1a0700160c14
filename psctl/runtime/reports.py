"""What the script reported of its steps, until it is sent or printed."""

from __future__ import annotations

import threading
from typing import Any

import torch

from psctl.errors import UsageError
from psctl.job.messages import StepReport


class Reports:
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
