"""A run in Weights & Biases, written by its own client; without a key it is written to a folder on the head."""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from psctl.export.metric_records import MetricRecords
from psctl.job import events

STEP = "psctl/step"
"""The axis of all curves: unlike the client's own steps it may go back, as it does after a restore."""


class WandbExport:
    """Writes the metrics of one job to a run that has the job's name.

    Args:
        project: PROJECT or ENTITY/PROJECT.
        job: the job's name.
        folder: the job's, in which the client writes its files.
        parameters: the run's parameters.
    """

    def __init__(self, project: str, job: str, folder: Path, parameters: dict[str, str | int]) -> None:
        entity, _, self._project = project.rpartition("/")
        self._entity = entity or None
        self._job, self._folder, self._parameters = job, folder, parameters
        offline = not os.environ.get("WANDB_API_KEY") and not os.environ.get("WANDB_MODE")
        self._mode = "offline" if offline else None
        self._run: wandb.Run | None = None
        self._records = MetricRecords()
        how = f"; WANDB_API_KEY is not among the job's `secrets`: wandb sync {folder}/wandb/offline-* sends it"
        self.place = f"for Weights & Biases, project {project}, run {job}{how if offline else ''}"

    def write(self, event: events.AnyEvent) -> None:
        """Write the numbers of an event; the first event of a job begins the run."""
        if isinstance(event, events.Started):
            self._run = self._begin(event)
        if self._run is None:
            return
        if isinstance(event, events.Planned) and event.decided:
            self._run.config.update({"strategy": event.chosen, "workers": event.world}, allow_val_change=True)
        records = self._records.of(event)
        if records:
            self._run.log({STEP: records[0].step, **{each.name: each.value for each in records}})
        if isinstance(event, events.Finished):
            self._run.finish(exit_code=event.exit)
            self._run = None

    def flush(self) -> None:
        """The client sends by itself."""

    def close(self) -> None:
        """The run ended with the last event."""

    def _begin(self, started: events.Started) -> wandb.Run:
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        run = wandb.init(
            project=self._project, entity=self._entity, name=self._job, id=f"{self._job}-{int(started.time)}",
            resume="allow", dir=str(self._folder), mode=self._mode, config=self._parameters, settings=settings,
        )  # fmt: skip
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run
