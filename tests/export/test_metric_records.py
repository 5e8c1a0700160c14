"""The numbers of events as records of curves."""

from __future__ import annotations

from psctl.export.metric_records import MetricRecord, MetricRecords, plain_name
from psctl.job import events

PROGRESS = events.Progress(
    time=5.0, step=10, epoch=1, metrics={"loss": 0.5}, examples_per_second=100.0, bytes_per_second=2e6,
    sync_seconds=0.01, compute_seconds=0.03, staleness=2, hidden_seconds=0.005, total=40,
)  # fmt: skip


def finished(**metrics: float) -> events.Finished:
    return events.Finished(time=9.0, status="done", exit=0, steps=12, seconds=4.0, metrics=metrics)


def test_progress_gives_the_scripts_numbers_and_psctls_own() -> None:
    found = {each.name: each for each in MetricRecords().of(PROGRESS)}
    assert found["loss"] == MetricRecord(10, 5.0, "loss", 0.5)
    assert {name: each.value for name, each in found.items()} == {
        "loss": 0.5, "psctl/epoch": 1, "psctl/examples_per_second": 100.0, "psctl/bytes_per_second": 2e6,
        "psctl/compute_seconds": 0.03, "psctl/sync_seconds": 0.01, "psctl/hidden_seconds": 0.005, "psctl/staleness": 2,
    }  # fmt: skip
    assert {(each.step, each.time) for each in found.values()} == {(10, 5.0)}


def test_numbers_of_a_group_bear_its_name() -> None:
    reported = events.GroupReported(time=6.0, group="evaluate", rank=0, step=9, metrics={"loss": 0.5})
    assert MetricRecords().of(reported) == [MetricRecord(9, 6.0, "evaluate/loss", 0.5)]
    (second,) = MetricRecords().of(events.GroupReported(time=6.0, group="serve", rank=1, step=9, metrics={"a": 1.0}))
    assert second.name == "serve/1/a"


def test_the_end_adds_only_values_that_are_new() -> None:
    records = MetricRecords()
    records.of(PROGRESS)
    assert records.of(finished(loss=0.5, accuracy=0.9)) == [MetricRecord(12, 9.0, "accuracy", 0.9)]


def test_a_checkpoint_gives_its_duration_and_other_events_nothing() -> None:
    written = events.CheckpointWritten(time=6.0, step=10, path="/c", bytes=5, seconds=0.2)
    assert MetricRecords().of(written) == [MetricRecord(10, 6.0, "psctl/checkpoint_seconds", 0.2)]
    assert MetricRecords().of(events.Log(time=1.0, rank="worker/0", stream="stdout", text="loss=1")) == []


def test_names_lose_what_programs_refuse() -> None:
    assert plain_name("train/loss") == "train/loss"
    assert plain_name("a\x1b[31m<script>\n") == "a__31m_script__"
    assert plain_name("\n") == "_"
    assert len(plain_name("x" * 5000)) == 200
