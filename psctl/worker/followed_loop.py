"""The steps of a loop that belongs to a library, which counts, saves and resumes; psctl says when to save and stop."""

from __future__ import annotations

from psctl.errors import UsageError
from psctl.train_state.common_step import StepActions
from psctl.worker.training_progress import TrainingProgress


class FollowedLoop:
    """The steps of a library's loop; every rank calls the same methods at the same steps.

    Args:
        progress: of the run; it has begun.
    """

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self._saved = -1

    def end_step(self, step: int, epoch: int = 0) -> StepActions:
        """Count a step that has ended.

        Args:
            step: its number; the library may have made several since the last call.
            epoch: the epoch in progress, from 0.

        Returns:
            whether the library must save now, and whether it must stop then.
        """
        if step <= self._progress.step:
            raise UsageError(
                f"the loop that psctl follows is at step {step} after step {self._progress.step}",
                "give the callback to one Trainer, and train once",
            )
        self._progress.epoch = epoch
        return self._progress.end_library_step(step)

    def saved(self, path: str) -> None:
        """Record that this rank has saved its part of the state after the last step; the job resumes from there.

        The record counts when every rank has made it.

        Args:
            path: where all of the state is; absolute, for another job's folder is another one.
        """
        if self._saved != self._progress.step:  # a Trainer may save at the end of an epoch what it has saved before
            self._saved = self._progress.step
            self._progress.save_library_path(path)
