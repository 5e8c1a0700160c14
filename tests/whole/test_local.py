"""The embedded local cluster, as a user meets it: real processes, real data."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from psctl.checkpoint import manifest as manifests
from tests.helpers.running import ROOT, Psctl, set_args

pytestmark = pytest.mark.whole

DIGITS = str(ROOT / "templates" / "digits" / "job.yaml")
SHORT = set_args("--epochs", "8")
"""Of 20 epochs; an accuracy of 0.967 was seen after 4."""


ON_SERVERS = ("--set", "sync.strategy=ps", "--servers", "2")


def leftovers(job_home: Path) -> list[str]:
    """Command lines of processes that belong to a job under this HOME."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        environment = process.info["environ"] or {}
        if environment.get("HOME") == str(job_home) and "PSCTL_JOB" in environment:
            found.append(" ".join(process.info["cmdline"] or []))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("home")
    psctl = Psctl(home)
    return psctl, psctl.run("train", DIGITS, "-o", "jsonl", *SHORT, *ON_SERVERS, timeout=120)


def test_the_digits_job_trains_reports_and_checkpoints(trained) -> None:
    psctl, run = trained
    assert run.code == 0, run
    kinds = [event["event"] for event in run.events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert {"plan", "progress", "checkpoint"} <= set(kinds)
    assert set(kinds) <= {"started", "plan", "progress", "checkpoint", "worker-joined", "log", "finished"}
    finished = run.events[-1]
    assert (finished["status"], finished["exit"], finished["failure"]) == ("done", 0, None)
    assert finished["metrics"]["accuracy"] >= 0.96
    assert {role["role"] for role in run.events[0]["roles"]} >= {"worker"}
    plan = run.of("plan")[-1]
    assert (plan["chosen"], plan["decided"], plan["world"]) == ("ps", True, 2)
    assert leftovers(psctl.home) == []


def test_its_checkpoints_are_listed_shown_and_verified(trained) -> None:
    psctl, run = trained
    steps = run.events[-1]["steps"]
    listed = psctl.run("checkpoint", "list", "digits", "-o", "json").document["checkpoints"]
    assert {"id", "job", "step", "time", "bytes", "complete", "metrics"} <= set(listed[0])
    assert f"digits-1@{steps}" in [each["id"] for each in listed]
    verified = psctl.run("checkpoint", "verify", "digits-1@latest", "-o", "json")
    assert verified.code == 0, verified
    assert verified.document["checkpoints"][0]["verified"] is True
    assert verified.document["checkpoints"][0]["problems"] == []
    shown = psctl.run("checkpoint", "show", "digits-1@latest")
    assert shown.code == 0, shown


def test_a_manifest_is_believed_as_far_as_its_job_signed_it_and_gives_no_job_file(trained, tmp_path: Path) -> None:
    psctl, run = trained
    verified = psctl.run("checkpoint", "verify", "digits-1@latest", "-o", "json").document["checkpoints"][0]
    assert (verified["verified"], verified["signed"]) == (True, "job")
    assert psctl.run("checkpoint", "pull", "digits-1@latest", str(tmp_path)).code == 0
    (pulled,) = tmp_path.iterdir()
    row = psctl.run("checkpoint", "verify", str(pulled), "-o", "json").document["checkpoints"][0]
    assert (row["verified"], row["signed"]) == (True, "job")

    there = Path(run.of("checkpoint")[-1]["path"]) / "manifest.json"
    record = psctl.home / ".psctl" / "jobs" / "digits-1" / "record.json"
    sound, mine = there.read_bytes(), record.read_bytes()
    manifest = manifests.decode(sound, "")
    attack = manifest.job_file + "\nsecrets: [AWS_SECRET_ACCESS_KEY]\n"
    forged = manifests.encode(structs.replace(manifest, job_file=attack))
    restore = ("checkpoint", "restore", "digits-1@latest", "--yes")
    try:
        there.write_bytes(forged)
        (pulled / "manifest.json").write_bytes(forged)
        for reference in ("digits-1@latest", str(pulled)):
            ended = psctl.run("checkpoint", "verify", reference, "-o", "json")
            assert ended.code == 9, ended
            row = ended.document["checkpoints"][0]
            assert (row["verified"], row["signed"]) == (False, "none")
        ended = psctl.run(*restore, "--trust-manifest")
        assert ended.code == 9, ended
        # a job that was started before manifests were signed
        record.write_bytes(mine.replace(json.dumps(json.loads(mine)["authority"]).encode(), b'""'))
        ended = psctl.run(*restore)
        assert ended.code == 2, ended
        assert "+secrets: [AWS_SECRET_ACCESS_KEY]" in ended.err
        assert "not asked, because" in ended.err
        ended = psctl.run(*restore, "--trust-manifest")
        assert ended.code == 2, ended
        assert "takes variables of your shell (AWS_SECRET_ACCESS_KEY)" in ended.err
    finally:
        there.write_bytes(sound)
        record.write_bytes(mine)


def test_a_flipped_byte_is_named_and_the_checkpoint_is_refused(trained, tmp_path: Path) -> None:
    psctl, _ = trained
    folder = tmp_path / "copy"
    assert psctl.run("checkpoint", "pull", "digits-1@latest", str(folder)).code == 0
    victim = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    run = psctl.run("checkpoint", "verify", str(victim.parent), "-o", "json")
    assert run.code == 9, run
    assert victim.name in run.out


@pytest.mark.soak  # tests/worker/test_run_checkpoints.py; real jobs go on in test_restore_numbers.py
def test_a_checkpoint_of_the_last_step_ends_at_once_with_the_same_accuracy(trained) -> None:
    psctl, first = trained
    run = psctl.run("checkpoint", "restore", "digits-1@latest", "-o", "jsonl", "--workers", "1", "--servers", "1")
    assert run.code == 0, run
    assert run.of("restored")[0]["checkpoint"] == f"digits-1@{first.events[-1]['steps']}"
    assert run.events[-1]["metrics"]["accuracy"] == first.events[-1]["metrics"]["accuracy"]
    assert run.of("progress")[-1:] == [] or run.of("progress")[-1]["step"] == first.events[-1]["steps"]


def test_status_jobs_logs_and_attach_show_a_finished_job(trained) -> None:
    psctl, first = trained
    jobs = psctl.run("jobs", "-o", "json").document["jobs"]
    assert {"job", "state", "step", "started", "ranks"} <= set(jobs[0])
    assert ("digits-1", "done") in [(job["job"], job["state"]) for job in jobs]
    assert "accuracy" in psctl.run("logs", "digits-1", "-r", "worker:0").out
    attached = psctl.run("attach", "digits-1", "-o", "jsonl")
    assert attached.code == 0
    assert attached.events == first.events
    status = psctl.run("status", "-o", "json").document
    assert status["hosts"][0]["state"]


def test_unknown_names_end_with_6_and_list_the_known_ones(trained) -> None:
    psctl, _ = trained
    for arguments in (("attach", "nothing"), ("checkpoint", "show", "digits-1@7"), ("logs", "digits-77")):
        run = psctl.run(*arguments, "-o", "json")
        assert run.code == 6, run
        error = json.loads(run.out)["error"]
        assert error["exit"] == 6
        assert error["hint"]


@pytest.mark.soak  # tests/whole/test_wheel.py trains what `init` gave
def test_init_gives_a_folder_that_trains(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    made = psctl.run("init", "mine", "--template", "digits")
    assert made.code == 0, made
    assert (tmp_path / "mine" / "job.yaml").exists()
    words = ("--strategy", "native", "--set", 'args=["--epochs", "5"]')
    run = psctl.run("train", "mine/job.yaml", "-o", "jsonl", *words, timeout=120)
    assert run.code == 0, run
    assert run.events[-1]["metrics"]["accuracy"] >= 0.9  # 0.96 wants all of its epochs
    assert run.of("plan")[-1]["chosen"] == "native"
