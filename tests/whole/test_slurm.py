"""Jobs on nodes of a real Slurm: the end of an allocation ends the job with one sentence, or moves it to another."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import slurm as library
from tests.helpers.running import ROOT, STEADY, Psctl, next_event, set_args, until

pytestmark = [pytest.mark.whole, pytest.mark.soak]

CLUSTER = f"version: 1\nname: slurm\nkind: slurm\nruntime: {{python: {sys.executable}, environment: existing}}\n"


@pytest.fixture(scope="module")
def slurm() -> Iterator[library.Slurm]:
    if reason := library.missing():
        pytest.skip(reason)
    with library.Slurm() as made:
        yield made


def test_a_job_runs_in_an_allocation_and_ends_with_it(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(CLUSTER)
    outside = Psctl(home, environment=slurm.env)
    none = outside.run("use", str(cluster))
    assert none.code == 6, none
    assert "psctl runs in none" in none.err

    allocation = slurm.allocate()
    inside = Psctl(home, environment={**slurm.env, **allocation})
    doctor = inside.run("doctor", str(cluster), "-o", "json")
    for host in doctor.document["hosts"]:
        rows = {check["check"]: check for check in host["checks"]}
        assert rows["slurm"]["detail"] == f"allocation {allocation['SLURM_JOB_ID']} starts steps there"
        assert all(check["ok"] for check in rows.values()), doctor

    train = ("train", str(STEADY), "--cluster", str(cluster), "--servers", "1")
    first = inside.run(*train, "-o", "jsonl", *set_args("--epochs", "2"))
    assert first.code == 0, first
    assert {each["host"] for each in first.of("worker-joined")} == {"n1", "n2"}
    until(lambda: not slurm.steps(allocation["SLURM_JOB_ID"]), name="steps of a job that has ended")

    # -d: the agents' steps outlive psctl; from outside of the allocation the job is followed and stopped
    slow = set_args("--epochs", "400", "--pause", "0.05")
    stopped = inside.run(*train, "-d", "-o", "json", *slow).document["job"]
    status = outside.run("status", stopped, "-o", "json").document
    assert {host["name"] for host in status["hosts"]} == {"n1", "n2"}
    stop = outside.run("stop", stopped, "--save")
    assert stop.code == 0, stop
    until(lambda: not slurm.steps(allocation["SLURM_JOB_ID"]), name="steps of a job that was stopped")

    job = inside.run(*train, "-d", "-o", "json", *slow).document["job"]
    with outside.start("attach", job, "-o", "jsonl") as follower:
        saved = next_event(follower, "checkpoint")
        slurm.run("scancel", allocation["SLURM_JOB_ID"])
        end = next_event(follower, "finished")
        assert follower.wait(60) == end["exit"] == 1
        assert follower.stderr is not None
        said = follower.stderr.read()
    # Slurm terminates processes before it kills them: in general the job has time to stop
    sentence = f"the Slurm allocation {allocation['SLURM_JOB_ID']} has ended (CANCELLED), and psctl's processes with it"
    assert sentence in (said if end["status"] == "stopped" else end["failure"]["exception"]), (end, said)
    assert outside.run("status", job, "-o", "json").document["jobs"][0]["state"] == end["status"]
    logs = outside.run("logs", job)  # the nodes' files are on a disk of this machine
    assert logs.code == 0, logs

    again = slurm.allocate(1)
    resumed = Psctl(home, environment={**slurm.env, **again}).run(
        "train", str(STEADY), "--cluster", "slurm", "--workers", "1", "--servers", "1", "-o", "jsonl",
        "--resume", f"{job}@latest", *set_args("--epochs", str(saved["step"] // 10 + 40)),
    )  # fmt: skip
    assert resumed.code == 0, resumed
    assert resumed.of("restored")[0]["step"] >= saved["step"]
    slurm.run("scancel", again["SLURM_JOB_ID"])


def test_train_submits_an_allocation_waits_for_it_and_cancels_it(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(f"{CLUSTER}nodes: 2\npartition: debug\ntime: 1h\nextra: [--comment=psctl-test]\n")
    psctl = Psctl(home, environment=slurm.env)
    train = ("train", str(STEADY), "--cluster", str(cluster), "--servers", "1")
    busy = slurm.allocate(2, "--exclusive")["SLURM_JOB_ID"]
    with psctl.start(*train) as given_up:
        assert given_up.stderr is not None
        assert "PENDING" in next(line for line in given_up.stderr if "waits" in line)
        given_up.send_signal(signal.SIGINT)
        assert given_up.wait(60) == 130
        given_up.stderr.read()
    assert slurm.run("squeue", "-h", "-o", "%i").stdout.split() == [busy]

    with psctl.start(*train, *set_args("--epochs", "2")) as waiting:
        assert waiting.stderr is not None
        assert "PENDING" in next(line for line in waiting.stderr if "waits" in line)
        slurm.run("scancel", busy)
        said = waiting.stderr.read()
        assert waiting.wait(60) == 0, said
    assert "Slurm granted allocation" in said
    assert "done: 20 steps" in said
    until(lambda: not slurm.run("squeue", "-h").stdout.strip(), name="the allocation of a job that has ended")

    slow = set_args("--epochs", "400", "--pause", "0.05")
    job = psctl.run(*train, "-d", "-o", "json", *slow).document["job"]
    row = slurm.run("squeue", "-h", "-o", "%T %D %P %k %l").stdout.split()
    assert row == ["RUNNING", "2", "debug", "psctl-test", "1:00:00"]
    assert psctl.run("status", job, "-o", "json").document["jobs"][0]["state"] == "running"
    stop = psctl.run("stop", job)
    assert stop.code == 0, stop
    until(lambda: not slurm.run("squeue", "-h").stdout.strip(), name="the allocation of a job that was stopped")

    cluster.write_text(f"{CLUSTER}partition: none\n")
    refused = psctl.run(*train, timeout=60)
    assert refused.code == 3, refused
    assert "sbatch ended with exit status 1" in refused.err


def test_a_job_that_slurm_ends_continues_in_another_allocation(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(f"{CLUSTER}nodes: 2\n")
    psctl = Psctl(home, environment=slurm.env)
    racks = psctl.run("plan", "--cluster", str(cluster), "--size", "100MB", "-o", "json")
    assert racks.code == 0, racks
    assert not slurm.run("squeue", "-h").stdout.strip(), "plan has cancelled what it was lent"

    train = ("train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-o", "jsonl")
    more = ("--set", "checkpoint.every=100000 steps", *set_args("--epochs", "60", "--pause", "0.05"))
    with psctl.start(*train, *more) as moved:
        started = next_event(moved, "started")
        next_event(moved, "progress")
        rows = psctl.run("status", started["job"], "-o", "json").document["hosts"]
        assert {row["name"]: row["labels"] for row in rows} == {"n1": {"rack": "rack1"}, "n2": {"rack": "rack2"}}
        slurm.run("scancel", "--signal=TERM", slurm.run("squeue", "-h", "-o", "%i").stdout.strip())
        saved = next_event(moved, "checkpoint")
        stopped = next_event(moved, "finished")
        assert (stopped["status"], stopped["exit"]) == ("stopped", 1)
        restored = next_event(moved, "restored")
        assert restored["step"] == saved["step"] == stopped["steps"]
        assert next_event(moved, "finished")["status"] == "done"
        assert moved.wait(60) == 0
    until(lambda: not slurm.run("squeue", "-h").stdout.strip(), name="the allocation of a job that has ended")


def test_a_node_that_fails_is_a_lost_host(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(f"{CLUSTER}nodes: 2\n")
    psctl = Psctl(home, environment=slurm.env)
    settings = (
        "--set",
        "restart.on_worker_loss=continue",
        "--set",
        "workers=2",
        *set_args("--epochs", "60", "--pause", "0.05"),
    )
    with psctl.start(
        "train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-o", "jsonl", *settings
    ) as job:
        next_event(job, "checkpoint")
        slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
        try:
            lost = next_event(job, "worker-lost")
            assert lost["host"] == "n2"
            end = next_event(job, "finished")
        finally:
            slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
        assert end["status"] == "done", end
        assert job.wait(60) == 0


@pytest.mark.timeout(900)
def test_a_requeued_batch_script_resumes(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(CLUSTER)
    script = tmp_path / "batch.sh"
    words = [
        sys.executable, "-m", "psctl", "train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-o", "jsonl",
        "--resume", "auto", *set_args("--epochs", "60", "--pause", "0.05"),
    ]  # fmt: skip
    script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    out = tmp_path / "out"
    number = slurm.run(
        "sbatch", "--parsable", "--requeue", "--nodes=2", f"--chdir={ROOT}", f"--output={out}", "--open-mode=append",
        f"--export=ALL,PSCTL_HOME={home}/psctl,HOME={home}", str(script),
    ).stdout.strip()  # fmt: skip

    def events(kind: str) -> list[dict[str, Any]]:
        lines = out.read_text().splitlines() if out.exists() else []
        return [row for row in map(json.loads, (line for line in lines if line[:1] == "{")) if row.get("event") == kind]

    until(lambda: events("checkpoint"), 240, name="a checkpoint")
    slurm.run("scontrol", "requeue", number)
    until(lambda: events("restored"), 400, name="the second run, which Slurm starts after two minutes")
    assert events("restored")[0]["step"] >= events("checkpoint")[0]["step"]
    until(lambda: events("finished") and events("finished")[-1]["status"] == "done", 120, name="the end")


def test_links_and_collectives_are_measured_in_an_allocation(slurm: library.Slurm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    cluster = tmp_path / "slurm.yaml"
    cluster.write_text(f"{CLUSTER}nodes: 2\n")
    allocation = slurm.allocate()
    inside = Psctl(home, environment={**slurm.env, **allocation})
    topo = inside.run("topo", str(cluster), "--measure", "-o", "json")
    assert topo.code == 0, topo
    assert {host["name"] for host in topo.document["hosts"]} == {"n1", "n2"}
    assert topo.document["between"] and all(link["measured"] for link in topo.document["between"]), topo
    words = (
        "bench",
        "allreduce",
        "--cluster",
        str(cluster),
        "--workers",
        "2",
        "--sizes",
        "1KB,100KB",
        "--strategy",
        "ring",
    )
    bench = inside.run(*words, "-o", "json")
    assert bench.code == 0, bench
    assert [(row["bytes"], row["world"], row["correct"]) for row in bench.document["results"]] == [
        (1_000, 2, True), (100_000, 2, True),
    ]  # fmt: skip
    jobs = inside.run("jobs", "-o", "json").document["jobs"]
    assert {rank["host"] for job in jobs for rank in job["ranks"] if rank["role"] == "worker"} == {"n1", "n2"}
    until(lambda: not slurm.steps(allocation["SLURM_JOB_ID"]), name="steps of a bench that has ended")
    slurm.run("scancel", allocation["SLURM_JOB_ID"])

    outside = Psctl(home, environment=slurm.env)
    lent = outside.run(*words, "-o", "json")
    assert lent.code == 0, lent
    assert [row["correct"] for row in lent.document["results"]] == [True, True]
    until(lambda: not slurm.run("squeue", "-h").stdout.strip(), name="the allocation of a bench that has ended")
