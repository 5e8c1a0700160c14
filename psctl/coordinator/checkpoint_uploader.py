"""Uploads checkpoints to the job's `checkpoint.to` on a thread of its own, so that training and saving go on meanwhile.

An upload that fails is tried again after a pause and continues where it stopped; after the last attempt it is left
until the target takes a later checkpoint.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from psctl.checkpoint.reader import folder_name
from psctl.checkpoint.upload import CheckpointTarget
from psctl.coordinator.state.instructions import CheckpointUploadEnded
from psctl.errors import PsctlError
from psctl.orders import JobOrder

PAUSES = (1.0, 4.0, 15.0)
"""Seconds before each further attempt."""


class CheckpointUploader:
    """Uploads the checkpoints of a job, one after another, and prunes them at the target.

    Args:
        folder: of the job's checkpoints on this host.
        order: the job.
        answer: takes the answers, from the uploader's thread.
        pauses: seconds before each further attempt.
    """

    def __init__(
        self, folder: Path, order: JobOrder, answer: Callable[[CheckpointUploadEnded], None],
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:  # fmt: skip
        self._folder, self._order, self._answer, self._pauses = folder, order, answer, pauses
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._missed: set[int] = set()  # steps that the target has not taken
        self._target: CheckpointTarget | None = None
        self._never = threading.Event()  # waits for a pause
        threading.Thread(target=self._run, name="psctl uploader", daemon=True).start()

    def upload(self, step: int) -> None:
        """Upload a checkpoint that is whole on disk; the answer is CheckpointUploadEnded."""
        self._steps.put(step)

    def _run(self) -> None:
        while True:
            step = self._steps.get()
            ended = self._upload(step, self._pauses)
            if ended.place:
                for earlier in sorted(self._missed - {step}):
                    if (self._folder / folder_name(earlier)).is_dir():
                        again = self._upload(earlier, ())
                        if again.place:
                            self._answer(again)
                    else:  # pruned: what the target has of it is removed below
                        self._missed.discard(earlier)
                ended = self._prune(ended)
            self._answer(ended)

    def _upload(self, step: int, pauses: tuple[float, ...]) -> CheckpointUploadEnded:
        folder = self._folder / folder_name(step)
        problem = ""
        for pause in (0.0, *pauses):
            self._never.wait(pause)
            if not folder.is_dir():
                problem = problem or "it was removed before it was uploaded"
                break
            try:
                if self._target is None:
                    self._target = CheckpointTarget(str(self._order.checkpoint.to))
                place = self._target.upload(folder)
            except PsctlError as error:
                problem = error.message
            else:
                self._missed.discard(step)
                return CheckpointUploadEnded(step, place)
        self._missed.add(step)
        return CheckpointUploadEnded(step, problem=problem)

    def _prune(self, ended: CheckpointUploadEnded) -> CheckpointUploadEnded:
        """Remove older checkpoints at the target; a refusal is the problem of an upload that is whole all the same."""
        assert self._target is not None, "a checkpoint was uploaded"
        keep = self._order.checkpoint
        try:
            self._target.prune(self._order.name, keep.keep, keep.keep_best, ended.step, self._missed)
        except PsctlError as error:
            return CheckpointUploadEnded(ended.step, ended.place, f"older ones are not removed: {error.message}")
        return ended
