"""The callback of Hugging Face's Trainer: progress, metrics, a polite stop, resume.

callback = HuggingFaceCallback()
trainer = Trainer(..., callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.checkpoint)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from psctl.callbacks.followed_job import FollowedJob


class HuggingFaceCallback(TrainerCallback):
    """Shows a job the steps and numbers of a Trainer, and has the Trainer save and stop when the job says so.

    `psctl stop --save`, and `checkpoint.every` of the job file, make the Trainer save in its `output_dir`. Where
    `psctl train` did not start the script, it does nothing.

    Args:
        accelerated: returns the DistributedDataParallel whose gradients are to be summed by the job's strategy:
            `lambda: trainer.model_wrapped`. None: the Trainer sums them.
    """

    def __init__(self, accelerated: Callable[[], nn.Module] | None = None) -> None:
        self._accelerated = accelerated
        self._job = FollowedJob()

    @property
    def checkpoint(self) -> str | None:
        """What to give `trainer.train(resume_from_checkpoint=...)`: the folder to resume from, or None.

        After a loss, and under `--resume`, it is the Trainer's last checkpoint that all ranks had finished.
        """
        return self._job.checkpoint

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin to count."""
        model = self._accelerated() if self._accelerated is not None else None
        self._job.begin(state.global_step, state.max_steps, model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Count the step; have the Trainer save and stop where that is due."""
        due = self._job.end_step(state.global_step, state.epoch or 0.0)
        control.should_save = control.should_save or due.save
        control.should_training_stop = control.should_training_stop or due.stop

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: Mapping[str, object] | None = None, **_: object,
    ) -> None:  # fmt: skip
        """Report the numbers."""
        self._job.report({name: value for name, value in (logs or {}).items() if name != "epoch"})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Record the checkpoint."""
        self._job.saved(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """End the script if the job was stopped."""
        self._job.leave_if_stopped()
