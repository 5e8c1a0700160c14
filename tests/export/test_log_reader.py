"""The event log, read while it grows."""

from __future__ import annotations

from pathlib import Path

from psctl.export.log_reader import read_events
from psctl.job import events
from tests.export.test_metric_records import PROGRESS, finished


def test_a_log_is_read_as_it_grows_up_to_its_end_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    line = events.to_line(PROGRESS)
    log.write_bytes(line + b"torn{\n" + line[:7])
    later = [line[7:], events.to_line(finished())]

    def grow(_: float) -> None:
        with log.open("ab") as file:
            file.write(later.pop(0))

    assert list(read_events(log, grow)) == [PROGRESS, None, PROGRESS, None, finished()]
