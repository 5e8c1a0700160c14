"""The exporter's process: programs do not disturb each other, and each failure is said once."""

from __future__ import annotations

import os
from pathlib import Path

from psctl.errors import PortTaken
from psctl.export.main import ExportStart, MetricsExport, Notices, export_all, follow, is_over
from psctl.job import events
from tests.export.test_metric_records import PROGRESS, finished

CURE = (
    "add tensorboard to `runtime: {requirements: [...]}` in the cluster file, or install it there; "
    "training goes on without it"
)


class Kept:
    """An export that keeps what it gets."""

    place = "nowhere"

    def __init__(self) -> None:
        self.got: list[object] = []

    def write(self, event: events.AnyEvent) -> None:
        self.got.append(event)

    def flush(self) -> None:
        self.got.append("flush")

    def close(self) -> None:
        self.got.append("close")


def test_programs_that_fail_are_said_once_and_the_others_get_everything(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(events.to_line(PROGRESS) + events.to_line(finished()))
    kept = Kept()

    def missing() -> MetricsExport:
        raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard.compat")

    def taken() -> MetricsExport:
        raise PortTaken("another process listens on\n 127.0.0.1:1", "another port")

    def broken() -> MetricsExport:
        raise ZeroDivisionError("of\na library" + "." * 1000)

    def full() -> MetricsExport:
        raise OSError(28, "No space left on device", "/tb")

    reader, writer = os.pipe()
    exports = {
        "tensorboard": ExportStart("tensorboard", missing, again=60.0),
        "prometheus": ExportStart("prometheus_client", taken),
        "other": ExportStart("other", broken), "disk": ExportStart("disk", full),
        "kept": ExportStart("kept", lambda: kept),
    }  # fmt: skip
    export_all(log, exports, Notices(writer, "h0"))
    os.close(writer)
    with os.fdopen(reader) as file:
        said = sorted(file.read().splitlines())
    assert said == [
        "metrics are written nowhere",
        "metrics: disk: No space left on device (/tb); training goes on without it",
        f"metrics: other: ZeroDivisionError: of a library{'.' * 209} ...; training goes on without it",
        "metrics: prometheus: another process listens on 127.0.0.1:1; another port; training goes on without it",
        f"metrics: tensorboard: needs the package tensorboard, and h0 has no module tensorboard: {CURE}",
    ]
    assert kept.got == [PROGRESS, finished(), "close"]


def test_a_server_that_did_not_answer_gets_the_whole_log_later(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(events.to_line(PROGRESS))
    kept, starts = Kept(), []

    def start() -> MetricsExport:
        starts.append(is_over(log))
        if len(starts) == 1:
            raise ConnectionRefusedError(111, "Connection refused")
        with log.open("ab") as file:
            file.write(events.to_line(finished()))
        return kept

    reader, writer = os.pipe()
    follow(log, "mlflow", ExportStart("mlflow-skinny", start, again=0.01), Notices(writer, "h0"))
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read().splitlines()
    assert said == [
        "metrics: mlflow: Connection refused; training goes on without it; tried again every 0.01 s",
        "metrics are written nowhere",
    ]
    assert kept.got == [PROGRESS, finished(), "close"]


def test_after_the_jobs_end_a_failure_is_tried_once_more_only(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(events.to_line(PROGRESS))
    starts: list[bool] = []

    def start() -> MetricsExport:
        starts.append(is_over(log))
        if len(starts) == 1:
            log.write_bytes(events.to_line(PROGRESS) + events.to_line(finished()))
        raise ConnectionRefusedError(111, "Connection refused")

    reader, writer = os.pipe()
    follow(log, "mlflow", ExportStart("mlflow-skinny", start, again=3600.0), Notices(writer, "h0"))
    os.close(reader)
    os.close(writer)
    assert starts == [False, True]
