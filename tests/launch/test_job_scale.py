"""A job whose agent answers no request yet cannot be scaled yet; one that has ended cannot be scaled at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl import errors
from psctl.job.events import Finished, to_line
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs import job_scale
from psctl.remote.local import LocalShell
from tests.helpers.running import ROOT


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[LocalShell]:
    opened = LocalShell("here", str(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    """A job whose agent is this process, which listens nowhere."""
    folder = tmp_path / "w" / "jobs" / "d-1" / "here"
    folder.mkdir(parents=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = f"{boot}:" + Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    host = HostRecord("here", str(tmp_path / "w"), str(folder), sys.executable, str(ROOT), os.getpid(), started)
    return JobRecord("d-1", "d", 1.0, KnownCluster("lab", "lab.yaml", "", 0.0), [host], "", "job.yaml", ".", "c0", "")


def test_a_job_that_is_starting_is_scaled_later(shell: LocalShell, record: JobRecord) -> None:
    with pytest.raises(errors.UsageError, match="d-1: the job is starting") as refused:
        job_scale.scale(shell, record, 3, None)
    assert "psctl attach d-1" in refused.value.hint


def test_a_job_that_has_ended_is_not_scaled(shell: LocalShell, record: JobRecord) -> None:
    line = to_line(Finished(time=2.0, status="done", exit=0, steps=1, seconds=1.0, metrics={}))
    (Path(record.head.job_dir) / "events.jsonl").write_bytes(line)
    with pytest.raises(errors.NoSuchJob, match="d-1 has ended"):
        job_scale.scale(shell, record, 3, None)
