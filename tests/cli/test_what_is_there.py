"""Commands say what is there: checkpoints kept and removed, ranks, and jobs of one name on other clusters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from psctl.job.events import RoleOf, Started, to_line
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster
from tests.checkpoint.conftest import write
from tests.cli.inside import psctl

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = "name: digits\nscript: train.py\nworkers: 1\n"


def job(folder: Path, cluster: KnownCluster) -> JobRecord:
    """Remember a job of two workers that is done."""
    host = HostRecord("local", str(folder), f"{folder}/jobs/digits-3/local", sys.executable, str(ROOT))
    record = JobRecord(
        "digits-3", "digits", 1.0, cluster, [host], JOB, "job.yaml", "", "c0de", f"{folder}/checkpoints", state="done",
        exit=0,
    )  # fmt: skip
    logs = Path(host.job_dir) / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.stdout.log").write_text("hello\n")
    roles = [RoleOf("worker", 0, "local"), RoleOf("worker", 1, "local")]
    started = Started(time=1.0, job="digits-3", hosts=["local"], roles=roles)
    (Path(host.job_dir) / "events.jsonl").write_bytes(to_line(started))
    return record


HERE = KnownCluster("local", "", "", 0.0)


def test_prune_reports_the_removed_and_the_kept_checkpoints(tmp_path: Path) -> None:
    Home(tmp_path / "state").save_record(job(tmp_path / "w", HERE))
    for step in (100, 200, 300):
        write(tmp_path / "w" / "checkpoints", step)
    nothing = psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "3").stdout.splitlines()
    assert nothing == [
        "removed\tnothing: digits-3 has 3 checkpoints on local",
        "kept\tdigits-3@100, digits-3@200, digits-3@300",
    ]
    (tmp_path / "w" / "checkpoints" / "digits-3" / "0000000250").mkdir()
    removed, kept, torn = psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "1", "-y").stdout.splitlines()
    assert removed.startswith("removed\tdigits-3@100, digits-3@200 (")
    assert (kept, torn) == ("kept\tdigits-3@300", "torn\tdigits-3@250: prune does not remove them")
    document = json.loads(psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "1", "-o", "json").stdout)
    assert (document["checkpoints"], [row["id"] for row in document["kept"]]) == ([], ["digits-3@250", "digits-3@300"])


def test_the_logs_of_a_rank_that_is_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    Home(tmp_path / "state").save_record(job(tmp_path / "w", HERE))
    assert "hello" in psctl(tmp_path, "logs", "digits", "-r", "worker:1").stdout
    for more in ([], ["--since", "1h"]):
        refused = psctl(tmp_path, "logs", "digits", "-r", "worker:1,9", *more, code=2).stderr.splitlines()
        assert refused == ["error: digits-3 has no worker/9", "  hint: there are worker/0, worker/1"]
    assert "has no server" in psctl(tmp_path, "logs", "digits", "-r", "server", code=2).stderr


def test_latest_does_not_take_a_job_of_that_name_on_another_cluster(tmp_path: Path) -> None:
    text = f"name: far\nruntime: {{environment: existing, workdir: {tmp_path / 'far'}}}\nhosts: [{{address: local}}]\n"
    other = KnownCluster("far", str(tmp_path / "far.yaml"), text, 0.0)
    Home(tmp_path / "state").save_record(job(tmp_path / "far", other))
    write(tmp_path / "far" / "checkpoints", 100)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.yaml").write_text(JOB)
    (tmp_path / "mine" / "train.py").write_text("")
    command = ["train", "mine/job.yaml", "--resume", "latest"]
    refused = psctl(tmp_path, *command, code=6).stderr.splitlines()
    assert refused[-2:] == [
        "error: no job digits has a checkpoint on cluster local",
        "  hint: digits-3 ran on cluster far; --resume digits-3@latest continues from it",
    ]
    assert [record.job for record in Home(tmp_path / "state").jobs()] == ["digits-3"]
