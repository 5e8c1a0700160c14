"""What callbacks do with the job whose Trainer they belong to; nothing where `psctl train` did not start the script."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psctl.errors import UsageError
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.train_state.common_step import StepActions
from psctl.worker.followed_loop import FollowedLoop
from psctl.worker.init import current_run, join
from psctl.worker.run import Run

FAR = 1 << 48
"""No training has so many steps."""


class FollowedJob:
    """The job of this process, if it has one, as the callback of a Trainer sees it."""

    def __init__(self) -> None:
        self._loop: FollowedLoop | None = None
        self._stops = False

    @property
    def checkpoint(self) -> str | None:
        """The Trainer's own checkpoint to resume from; None: it starts anew.

        Raises:
            UsageError: it is gone; the user's fault.
        """
        run = _run()
        path = run.library_path if run is not None else None
        if path is not None and not os.path.exists(path):
            raise UsageError(
                f"{path}, where the Trainer had saved its state, is not on {os.uname().nodename} any more",
                "save to a disk that all hosts of the job share, or start anew: --resume never",
            )
        return path

    def begin(self, step: int, total: float, model: nn.Module | None) -> None:
        """Begin to count steps, when every rank has come here.

        Args:
            step: steps that were finished before.
            total: steps of the whole training; not finite, or below 1, where it is not known.
            model: the DistributedDataParallel to accelerate; None: none.
        """
        run = _run()
        if run is None:
            return
        if model is not None and not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"the callback was told to accelerate a {type(model).__name__}, which is no DistributedDataParallel",
                "give it no model where the Trainer uses another strategy, or one worker only",
            )
        self._loop = run.follow(step, model)
        if math.isfinite(total) and 1 <= total <= FAR:
            run.report(total=int(total))

    def end_step(self, step: int, epoch: float) -> StepActions:
        """Count a step that has ended; return what the Trainer must do now."""
        actions = self._loop.end_step(step, int(epoch)) if self._loop is not None else StepActions()
        self._stops = self._stops or actions.stop
        return actions

    def report(self, numbers: Mapping[str, object]) -> None:
        """Report the Trainer's numbers as metrics; values of other kinds are left out."""
        run = _run() if self._loop is not None else None
        if run is not None:
            kept: dict[str, Any] = {name: value for name, value in numbers.items() if _is_number(value)}
            kept.pop("total", None)  # the name of report's own argument
            run.report(**kept)

    def saved(self, path: str) -> None:
        """Record that this rank has saved its part of the Trainer's state."""
        if self._loop is not None:
            self._loop.saved(os.path.abspath(path))

    def leave_if_stopped(self) -> None:
        """End the script with status 0 if a stop was requested, so that it does not publish what is half trained."""
        run = _run() if self._stops else None
        if run is None:
            return
        run.finish()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # Gloo may abort a process that exits before it
        raise SystemExit(0)


def _run() -> Run | None:
    if ENVIRONMENT not in os.environ:
        return None
    return current_run() or join(f"{sys.argv[0]}, by a callback of psctl", seeded=False)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
