"""A run in MLflow, written by its own client."""

from __future__ import annotations

import os

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from psctl.export.metric_records import MetricRecord, MetricRecords, plain_name
from psctl.job import events

AT_ONCE = 500
"""Numbers of one call; MLflow takes 1000."""

STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
"""The client's own variable for the name of the experiment."""

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
"""The client's own variable for the number of its attempts."""


class MlflowExport:
    """Writes the metrics of one job to a run that has the job's name.

    Where the run is there already, because another host led before or the server did not answer for a while, it is
    continued: MLflow keeps a number once.

    Args:
        uri: of the tracking server, or of a database.
        job: the job's name, such as digits-3; its experiment is digits.
        parameters: the run's parameters.

    Raises:
        MlflowException: the server refuses or cannot be reached.
    """

    def __init__(self, uri: str, job: str, parameters: dict[str, str | int]) -> None:
        os.environ.setdefault(RETRIES, "3")  # with pauses of 2, 4 and 8 s; then the exporter tries again by itself
        self._client = MlflowClient(tracking_uri=uri)
        self._job, self._parameters = job, parameters
        experiment = os.environ.get(EXPERIMENT) or job.rpartition("-")[0] or job
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run = ""
        self._records = MetricRecords()
        self._waiting: list[MetricRecord] = []
        self.place = f"to MLflow at {uri}, experiment {experiment}, run {job}"

    def write(self, event: events.AnyEvent) -> None:
        """Take the numbers of an event; the first event of a job begins the run."""
        if isinstance(event, events.Started):
            self._run = self._run_of(event)
        if isinstance(event, events.Planned) and event.decided:
            self._write_parameters(self._parameters | {"strategy": event.chosen, "workers": event.world})
        self._waiting += self._records.of(event)
        if len(self._waiting) >= AT_ONCE:
            self.flush()
        if isinstance(event, events.Finished) and self._run:
            self.flush()
            self._write_parameters(self._parameters)
            self._client.set_terminated(self._run, STATUS.get(event.status, "FAILED"), end_time=_milliseconds(event))

    def flush(self) -> None:
        """Send what waits."""
        while self._waiting and self._run:
            sent = self._waiting[:AT_ONCE]
            metrics = [Metric(each.name, each.value, int(each.time * 1000), each.step) for each in sent]
            self._client.log_batch(self._run, metrics=metrics)
            del self._waiting[: len(sent)]

    def close(self) -> None:
        """Everything was sent with the last event."""

    def _run_of(self, started: events.Started) -> str:
        tags = {"psctl.job": self._job, "psctl.started": str(started.time), "psctl.hosts": ", ".join(started.hosts)}
        mine = " and ".join(f"tags.`{name}` = '{tags[name]}'" for name in ("psctl.job", "psctl.started"))
        for run in self._client.search_runs([self._experiment], mine):
            if run.data.params:
                self._parameters = {}
            return str(run.info.run_id)
        made = self._client.create_run(
            self._experiment, start_time=_milliseconds(started), tags=tags, run_name=self._job
        )
        return str(made.info.run_id)

    def _write_parameters(self, parameters: dict[str, str | int]) -> None:
        """Write the parameters, which MLflow takes once."""
        if self._parameters and self._run:
            params = [Param(plain_name(name), str(value)) for name, value in parameters.items()]
            self._client.log_batch(self._run, params=params[:100])
        self._parameters = {}


def _milliseconds(event: events.Event) -> int:
    return int(event.time * 1000)
