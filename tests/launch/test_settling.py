"""What is written down of a job's end and shown of its steps, from what its host answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.launch import status
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster
from psctl.launch.stop import settle

RECORD = JobRecord(
    job="digits-1", name="digits", created=1.0, cluster=KnownCluster("lab", "", "", 0.0),
    hosts=[HostRecord("a", "/w", "/w/jobs/digits-1/a", "python3", "/w/code/1")], job_file="", job_source="",
    job_folder="", code_hash="", checkpoints="", step=3,
)  # fmt: skip
WORKER = {"role": "worker", "rank": 0, "host": "a", "pid": 7, "state": "running", "step": 5}
SERVER = {"role": "server", "rank": 0, "host": "a", "pid": 8, "state": "running", "step": 0}


@pytest.mark.parametrize(
    ("digest", "forced", "ended"),
    [
        ({"finished": {"status": "done", "exit": 0, "steps": 9}}, False, ("done", 0, 9)),
        ({"alive": True, "progress": {"step": 7}}, True, ("stopped", 1, 7)),
        ({"alive": False, "progress": {"step": 7}}, False, ("failed", 1, 7)),
        ({"alive": False}, False, ("failed", 1, 3)),
        ({"alive": True, "progress": {"step": 7}}, False, ("submitted", None, 3)),
    ],
)
def test_a_jobs_end_keeps_its_last_step(
    tmp_path: Path, digest: dict[str, Any], forced: bool, ended: tuple[str, int | None, int]
) -> None:
    settled = settle(Home(tmp_path), RECORD, digest, forced=forced)
    assert (settled.state, settled.exit, settled.step) == ended


def test_a_worker_is_not_shown_behind_the_job(tmp_path: Path) -> None:
    digest = {"alive": True, "state": "running", "progress": {"step": 24}, "ranks": {"w": WORKER, "s": SERVER}}
    shown = status._document(Home(tmp_path), RECORD, digest, None)
    assert shown["step"] == 24
    assert [(rank["role"], rank["step"]) for rank in shown["ranks"]] == [("worker", 24), ("server", 0)]


def test_a_job_that_is_over_shows_what_was_written_down(tmp_path: Path) -> None:
    over = msgspec.structs.replace(RECORD, state="done", exit=0, ranks=[WORKER])
    assert status._document(Home(tmp_path), over, None, None)["ranks"][0]["step"] == 5
