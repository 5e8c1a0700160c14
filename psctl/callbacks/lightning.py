"""The callback of Lightning's Trainer: progress, metrics, checkpoints, a polite stop, resume.

callback = LightningCallback()
trainer = lightning.Trainer(..., callbacks=[callback])
trainer.fit(module, data, ckpt_path=callback.checkpoint)
"""

from __future__ import annotations

from pathlib import Path

from lightning import Callback, LightningModule, Trainer

from psctl.callbacks.followed_job import FollowedJob


class LightningCallback(Callback):
    """Shows a job the steps and numbers of a Trainer, and has the Trainer save and stop when the job says so.

    `psctl stop --save`, and `checkpoint.every` of the job file, save the Trainer's state in `folder`. Where
    `psctl train` did not start the script, it does nothing.

    Args:
        folder: gets a file `step-N.ckpt` a checkpoint.
        keep: number of the newest files to keep there; 2 or more, for the newest one may not be complete.
        accelerate: have the gradients of the Trainer's DistributedDataParallel summed by the job's strategy.
    """

    def __init__(self, folder: str = "psctl-checkpoints", keep: int = 3, *, accelerate: bool = False) -> None:
        if keep < 2:
            raise ValueError(f"LightningCallback(keep={keep}): keep 2 checkpoints or more, for one is being written")
        self._folder, self._keep, self._accelerate = Path(folder), keep, accelerate
        self._job = FollowedJob()
        self._step = 0

    @property
    def checkpoint(self) -> str | None:
        """What to give `trainer.fit(ckpt_path=...)`: the file to resume from, or None.

        After a loss, and under `--resume`, it is the last checkpoint that all ranks had finished.
        """
        return self._job.checkpoint

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._step = trainer.global_step
        model = trainer.strategy.model if self._accelerate and trainer.world_size > 1 else None
        self._job.begin(self._step, trainer.estimated_stepping_batches, model)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Count the step if the optimizer has made one; save and stop where that is due."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        due = self._job.end_step(self._step, trainer.current_epoch)
        self._job.report(trainer.callback_metrics)
        if due.save:
            self._save(trainer)
        trainer.should_stop = trainer.should_stop or due.stop

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the numbers of a validation."""
        self._job.report(trainer.callback_metrics)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the script if the job was stopped."""
        self._job.leave_if_stopped()

    def _save(self, trainer: Trainer) -> None:
        path = self._folder / f"step-{self._step}.ckpt"
        trainer.save_checkpoint(path)
        self._job.saved(str(path))
        steps = sorted(int(each.stem.removeprefix("step-")) for each in self._folder.glob("step-*.ckpt"))
        for step in steps[: -self._keep] if trainer.is_global_zero else ():
            trainer.strategy.remove_checkpoint(self._folder / f"step-{step}.ckpt")
