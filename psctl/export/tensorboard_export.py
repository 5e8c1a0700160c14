"""Event files for TensorBoard, written by its own library."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from psctl.export.metric_records import MetricRecords
from psctl.job import events

HPARAMS = "_hparams_/session_start_info"
"""The tag under which the plug-in for hyperparameters looks for a run's values."""


class TensorboardExport:
    """Writes the metrics of one job.

    Args:
        folder: of the event files.
        parameters: the run's hyperparameters.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, parameters: dict[str, str | int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.place = f"for TensorBoard; on the head: tensorboard --logdir {shlex.quote(str(folder))}"
        self._writer = EventFileWriter(str(folder))
        self._records = MetricRecords()
        self._parameters: dict[str, str | int] | None = parameters
        self._begin(0, time.time())  # the whole log follows: it replaces what an earlier exporter wrote here

    def write(self, event: events.AnyEvent) -> None:
        """Write the numbers of an event."""
        if isinstance(event, events.Planned) and event.decided and self._parameters is not None:
            self._write_parameters(event.time, self._parameters | {"strategy": event.chosen, "workers": event.world})
        if isinstance(event, events.Restored):
            self._begin(event.step + 1, event.time)
        for record in self._records.of(event):
            value = Summary.Value(tag=record.name, simple_value=record.value)
            self._writer.add_event(Event(step=record.step, wall_time=record.time, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Write what waits to the file."""
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._parameters is not None:
            self._write_parameters(time.time(), self._parameters)
        self._writer.close()

    def _begin(self, step: int, when: float) -> None:
        """Mark that the numbers of this step and later ones come again: TensorBoard forgets those before the mark."""
        self._writer.add_event(Event(step=step, wall_time=when, session_log=SessionLog(status=SessionLog.START)))

    def _write_parameters(self, when: float, parameters: dict[str, str | int]) -> None:
        started = SessionStartInfo(start_time_secs=when)
        for name, value in parameters.items():
            if isinstance(value, int):
                started.hparams[name].number_value = value
            else:
                started.hparams[name].string_value = value
        content = HParamsPluginData(session_start_info=started, version=0).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
        value = Summary.Value(tag=HPARAMS, metadata=SummaryMetadata(plugin_data=plugin))
        self._writer.add_event(Event(step=0, wall_time=when, summary=Summary(value=[value])))
        self._parameters = None
