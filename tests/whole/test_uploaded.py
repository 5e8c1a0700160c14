"""A job whose checkpoints go to a URL: uploaded behind training, and refused early where a package is missing."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.checkpoint.upload import CheckpointTarget
from tests.helpers.running import STEADY, Psctl, set_args, until

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(400)]
COMMON = ("--workers", "1", "--servers", "1", "-o", "jsonl")


def test_checkpoints_are_at_the_url_when_the_job_is_over(tmp_path: Path) -> None:
    psctl, target = Psctl(tmp_path), f"file://{tmp_path}/shelf"
    run = psctl.run(
        "train", str(STEADY), *COMMON, "--set", f"checkpoint.to={target}", "--set", "checkpoint.keep=2",
        "--set", "checkpoint.keep_best=null", *set_args("--epochs", "4"), timeout=300,
    )  # fmt: skip
    assert run.code == 0, run
    written = [event["step"] for event in run.of("checkpoint")]
    assert CheckpointTarget(target).steps("steady-1") == written[-2:]
    CheckpointTarget(target).fetch("steady-1", written[-1], tmp_path / "back" / f"{written[-1]:010d}")


def test_a_target_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "shelf").write_text("a file is in the way")
    run = Psctl(tmp_path).run(
        "train", str(STEADY), *COMMON, "--set", f"checkpoint.to={tmp_path}/shelf", *set_args("--epochs", "2"),
        timeout=300,
    )  # fmt: skip
    assert run.code == 0, run
    assert run.of("checkpoint")
    (log,) = tmp_path.glob(".psctl/**/events.jsonl")
    assert "is not uploaded" in log.read_text()


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named_before_training_starts(tmp_path: Path) -> None:
    run = Psctl(tmp_path).run("train", str(STEADY), *COMMON, "--set", "checkpoint.to=gs://bucket/shelf", timeout=300)
    assert run.code != 0
    error = run.document["error"]
    assert "needs gcsfs" in error["message"]
    assert "runtime.requirements" in error["hint"]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """Start a server of the S3 protocol; HOME has its address and credentials. The value is the URL of a bucket."""
    pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {address}\n")
    (folder / "credentials").write_text("[default]\naws_access_key_id = name\naws_secret_access_key = secret\n")
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        until(lambda: _connects(port), 60, name="the S3 server")
        client = boto3.client(
            "s3",
            endpoint_url=address,
            aws_access_key_id="name",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="shelf")
        yield "s3://shelf/runs"
    finally:
        server.terminate()
        server.wait(30)


def _connects(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_continues_from_s3_when_its_host_has_lost_everything(tmp_path: Path, bucket: str) -> None:
    psctl = Psctl(tmp_path)
    run = psctl.run(
        "train", str(STEADY), *COMMON, "--set", f"checkpoint.to={bucket}", "--set", "checkpoint.keep_best=null",
        *set_args("--epochs", "4"), timeout=300,
    )  # fmt: skip
    assert run.code == 0, run
    steps = [event["step"] for event in run.of("checkpoint")][-3:]
    newest = f"{bucket}/steady-1@{steps[-1]}"
    listed = psctl.run("checkpoint", "list", bucket, "-o", "json").document["checkpoints"]
    assert [row["id"] for row in listed] == [f"steady-1@{step}" for step in steps]
    shown = psctl.run("checkpoint", "show", newest, "-o", "json")
    assert (shown.document["id"], shown.document["signed"]) == (f"steady-1@{steps[-1]}", "job"), shown
    drawn = psctl.run("checkpoint", "show", newest)
    assert f"psctl checkpoint restore {newest}" in drawn.out, drawn

    (workdir,) = tmp_path.glob(".psctl/host")
    shutil.rmtree(workdir)
    verified = psctl.run("checkpoint", "verify", newest, "-o", "json")
    assert verified.document["checkpoints"][0]["problems"] == [], verified
    lost = psctl.run("checkpoint", "restore", newest, timeout=120)
    assert lost.code != 0, lost
    assert "its code is no longer on" in lost.err and "--job JOB.yaml" in lost.err, lost

    more = (*COMMON, *set_args("--epochs", "6"))
    resumed = psctl.run("train", str(STEADY), "--resume", f"{bucket}/steady-1@latest", *more, timeout=300)
    assert resumed.code == 0, resumed
    assert [event["step"] for event in resumed.of("restored")] == [steps[-1]]
    assert resumed.events[-1]["steps"] == 60 - steps[-1]

    # this machine has no record of the job: its job file and code are not run, others continue from its values
    shutil.rmtree(tmp_path / ".psctl/jobs/steady-1")
    stranger = psctl.run("checkpoint", "restore", newest)
    assert stranger.code == 2, stranger
    assert f"psctl checkpoint restore {newest} --job JOB.yaml" in stranger.err
    other = psctl.run("checkpoint", "restore", newest, "--job", str(STEADY), *more, timeout=300)
    assert other.code == 0, other
    assert [event["step"] for event in other.of("restored")] == [steps[-1]]
    assert "its signature is not verified" in other.err

    out = tmp_path / "model.safetensors"
    exported = psctl.run("checkpoint", "export", newest, str(out), "-o", "json")
    assert exported.document["bytes"] == out.stat().st_size > 0, exported
    pruned = psctl.run("checkpoint", "prune", f"{bucket}/steady-1", "--keep", "1", "--yes", "-o", "json")
    assert [row["step"] for row in pruned.document["checkpoints"]] == steps[:-1], pruned
    left = psctl.run("checkpoint", "list", f"{bucket}/steady-1", "-o", "json").document["checkpoints"]
    assert [row["step"] for row in left] == steps[-1:]
    unknown = psctl.run("train", str(STEADY), "--resume", f"{bucket}/steady-1@7")
    assert unknown.code != 0 and "has no checkpoint 7 of steady-1" in unknown.err, unknown
