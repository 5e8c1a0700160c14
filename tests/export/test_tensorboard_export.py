"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from psctl.export.tensorboard_export import HPARAMS, TensorboardExport
from psctl.job import events
from tests.export.test_metric_records import PROGRESS, finished

PLANNED = events.Planned(time=1.0, size=8, world=3, chosen="ring", reason="", decided=True, candidates=[])


def at(step: int, loss: float) -> events.Progress:
    return msgspec.structs.replace(PROGRESS, step=step, metrics={"loss": loss})


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_curves_and_parameters_are_read_back(tmp_path: Path) -> None:
    export = TensorboardExport(tmp_path / "tb", {"args/lr": "0.1", "seed": 7, "strategy": "auto", "workers": 2})
    for event in (PLANNED, at(1, 0.5), at(2, 0.25), finished(accuracy=0.75)):
        export.write(event)
    export.close()
    found = read(tmp_path / "tb")
    losses = [(each.step, each.value, each.wall_time) for each in found.Scalars("loss")]
    assert losses == [(1, 0.5, 5.0), (2, 0.25, 5.0)]
    assert [(each.step, each.value) for each in found.Scalars("accuracy")] == [(12, 0.75)]
    assert found.Scalars("psctl/examples_per_second")[0].value == 100.0
    content = HParamsPluginData.FromString(found.SummaryMetadata(HPARAMS).plugin_data.content)
    values = content.session_start_info.hparams
    assert (values["args/lr"].string_value, values["seed"].number_value) == ("0.1", 7)
    assert (values["strategy"].string_value, values["workers"].number_value) == ("ring", 3)


def test_steps_that_are_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    export = TensorboardExport(tmp_path, {})
    restored = events.Restored(time=6.0, checkpoint="j@1", step=1)
    for event in (at(1, 0.5), at(2, 0.4), at(3, 0.3), restored, at(2, 0.2)):
        export.write(event)
    export.close()
    assert [(each.step, round(each.value, 3)) for each in read(tmp_path).Scalars("loss")] == [(1, 0.5), (2, 0.2)]


def test_what_waits_is_in_the_file_after_a_flush(tmp_path: Path) -> None:
    export = TensorboardExport(tmp_path, {})
    export.write(at(1, 0.5))
    export.flush()
    assert [each.step for each in read(tmp_path).Scalars("loss")] == [1]
    export.close()
