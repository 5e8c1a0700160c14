"""Hosts that a command reaches in place of SSH: psctl has no key for them, and no sshd takes part."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.hosts import PATH
from tests.helpers.running import ROOT, STEADY, Psctl, assert_clean, next_event, set_args, until

pytestmark = pytest.mark.whole

EXEC = f"nsenter -t {{host}} -m -u -i -n -p -- env -i HOME=/root PATH={PATH} {{command}}"
"""As `docker exec` does it: the address is the first process of the host."""


def cluster_text(hosts: str, more: str = "") -> str:
    runtime = f"runtime: {{python: {sys.executable}, environment: existing, env: {{OMP_NUM_THREADS: 1}}}}\n"
    return f'version: 1\nname: pods\nkind: command\nexec: "{EXEC}"\n{runtime}{more}hosts: {hosts}\n'


@pytest.mark.soak  # the tests below run jobs on such hosts too
def test_a_job_lives_on_hosts_that_a_command_reaches(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = tmp_path / "home"
    home.mkdir()  # without .ssh: no login over SSH would succeed
    psctl, cluster = Psctl(home), tmp_path / "pods.yaml"
    listed = ", ".join(f'{{address: "{hosts[name].init}", name: {name}}}' for name in hosts)
    cluster.write_text(cluster_text(f"[{listed}]"))

    up = psctl.run("up", str(cluster), "-o", "json")
    assert [(host["name"], host["state"]) for host in up.document["hosts"]] == [("h1", "created"), ("h2", "created")], (
        up
    )
    doctor = psctl.run("doctor", "-o", "json")
    for host in doctor.document["hosts"]:
        rows = {check["check"]: check for check in host["checks"]}
        assert all(check["ok"] for check in rows.values()), doctor
        assert rows["exec"]["detail"] == "`nsenter` starts commands there"
        assert rows["interface"]["detail"].startswith(f"eth0 {hosts[host['name']].address}: "), rows
        assert "resolve" not in rows

    slow = set_args("--epochs", "40", "--pause", "0.05")
    detached = psctl.run("train", str(STEADY), "--servers", "1", "-d", "-o", "json", *slow)
    assert detached.code == 0, detached
    job = detached.document["job"]
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        next_event(follower, "checkpoint")
        status = psctl.run("status", job, "-o", "json").document["jobs"][0]
        assert status["state"] == "running"
        assert {rank["host"] for rank in status["ranks"] if rank["role"] == "worker"} == {"h1", "h2"}
        logs = psctl.run("logs", job, "--tail", "5")
        assert logs.code == 0, logs
        stopped = psctl.run("stop", job, "--save")
        assert stopped.code == 0, stopped
        end = next_event(follower, "finished")
        assert follower.wait(30) == end["exit"] == 1
    assert end["status"] == "stopped"
    down = psctl.run("down", "--purge", "--yes")
    assert down.code == 0, down
    assert_clean(hosts)


@pytest.mark.soak
def test_hosts_that_a_command_lists_run_a_job_and_a_host_that_is_gone_is_named(make_hosts: Any, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = tmp_path / "home"
    home.mkdir()
    psctl, cluster, names = Psctl(home), tmp_path / "pods.yaml", tmp_path / "names"
    first, second = (str(hosts[name].init) for name in hosts)
    names.write_text(f"pod/{first}\npod/{second}\n")
    cluster.write_text(cluster_text(f'{{from: "cat {names}"}}'))
    run = psctl.run(
        "train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-o", "jsonl", *set_args("--epochs", "2")
    )
    assert run.code == 0, run
    assert run.of("finished")[0]["steps"] == 20
    names.unlink()  # later commands of the job use the hosts that it was started on
    job = run.of("started")[0]["job"]
    logs = psctl.run("logs", job)
    assert logs.code == 0, logs
    gone = psctl.run("doctor", str(cluster), "-o", "json")
    assert gone.code == 3, gone
    assert "No such file" in gone.document["error"]["message"]

    hosts.crash("h2")
    names.write_text(f"{first}\n{second}\n")
    lost = psctl.run("doctor", str(cluster), "-o", "json")
    assert lost.code != 0, lost
    rows = {host["name"]: {check["check"]: check for check in host["checks"]} for host in lost.document["hosts"]}
    assert rows[first]["exec"]["ok"]
    assert not rows[second]["exec"]["ok"]
    assert "`nsenter -t" in rows[second]["exec"]["detail"]
    assert "began nothing there" in rows[second]["exec"]["detail"]


SCRIPT = """
import hashlib, os, pathlib
print("corpus", hashlib.sha256(pathlib.Path("data/corpus/large.bin").read_bytes()).hexdigest()[:8])
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out", "rank-" + os.environ["RANK"]).write_text("result " + os.environ["RANK"])
"""


@pytest.mark.parametrize(
    "shared", [pytest.param(False, id="a disk each", marks=pytest.mark.soak), pytest.param(True, id="one disk")]
)
def test_data_is_sent_once_a_disk_and_outputs_come_back(tmp_path: Path, shared: bool) -> None:
    for name in ("home", "box-1", "box-2", "mine/corpus"):
        (tmp_path / name).mkdir(parents=True)
    psctl, cluster = Psctl(tmp_path / "home"), tmp_path / "boxes.yaml"
    text = cluster_text("[box-1, box-2]").replace(EXEC, f"env HOME={tmp_path}/{{host}} {{command}}")
    if shared:
        text = text.replace("runtime: {", f"runtime: {{workdir: {tmp_path}/shared, ")
    cluster.write_text(text)
    (tmp_path / "mine/corpus/large.bin").write_bytes(random.Random(0).randbytes(3_000_000))
    (tmp_path / "mine/train.py").write_text(SCRIPT)
    job = tmp_path / "mine/job.yaml"
    job.write_text(
        "version: 1\nname: corpus\nscript: train.py\nworkers: {per_host: 1}\noutputs: [out/]\n"
        "data: [{from: corpus, to: data/corpus}]\ncheckpoint: {every: null}\n"
    )
    first = psctl.run("train", str(job), "--cluster", str(cluster))
    assert first.code == 0, first
    assert first.err.count("sending corpus (3 MB in 1 files)") == (1 if shared else 2), first
    places = [tmp_path / "shared"] if shared else [tmp_path / name / ".psctl/host" for name in ("box-1", "box-2")]
    for place in places:
        assert len(list((place / "data").rglob("large.bin"))) == 1
    results = {path.name: path.read_text() for path in (tmp_path / "mine/outputs/corpus-1/out").iterdir()}
    assert results == {"rank-0": "result 0", "rank-1": "result 1"}

    again = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl")
    assert again.code == 0, again
    assert "sending corpus" not in again.err
    printed = [event["text"] for event in again.of("log") if event["text"].startswith("corpus ")]
    assert len(printed) == 2 and len(set(printed)) == 1


@pytest.mark.soak
def test_a_job_runs_in_an_allocation_of_any_batch_system(tmp_path: Path) -> None:
    for name in ("home", "node-1", "node-2"):
        (tmp_path / name).mkdir()
    psctl, cluster, allocation = Psctl(tmp_path / "home"), tmp_path / "nodes.yaml", tmp_path / "allocation"
    allocation.write_text("node-1\nnode-2\n")
    engine = f"{sys.executable} {ROOT}/tests/helpers/step_engine.py {allocation} {{host}} {{command}}"
    text = cluster_text(f'{{from: "cat {allocation}"}}', "steps: true\n").replace(EXEC, engine)
    cluster.write_text(text)
    train = ("train", str(STEADY), "--cluster", str(cluster), "--servers", "1", "-d", "-o", "json")
    detached = psctl.run(*train, *set_args("--epochs", "40", "--pause", "0.05"))
    assert detached.code == 0, detached
    job = detached.document["job"]
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        assert next_event(follower, "progress")["step"] >= 0
        ranks = psctl.run("status", job, "-o", "json").document["jobs"][0]["ranks"]
        assert {rank["host"] for rank in ranks} == {"node-1", "node-2"}
        assert len(starters(allocation)) >= 2, "each agent keeps its exec: running"
        stopped = psctl.run("stop", job)
        assert stopped.code == 0, stopped
        next_event(follower, "finished")
        follower.wait(30)
    until(lambda: not starters(allocation), name="the steps of a job that was stopped")


def starters(allocation: Path) -> list[int]:
    """Return the processes of the engine that run for an allocation."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if str(allocation) in (each.info["cmdline"] or [])]


def test_two_hosts_on_one_machine_need_no_root(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("home", "box-1", "box-2"):
        (tmp_path / name).mkdir()
    psctl, cluster = Psctl(home), tmp_path / "boxes.yaml"
    text = cluster_text("[box-1, box-2]").replace(EXEC, f"env HOME={tmp_path}/{{host}} {{command}}")
    cluster.write_text(text)
    job = ROOT / "templates/digits/job.yaml"
    run = psctl.run("train", str(job), "--cluster", str(cluster), "-o", "jsonl", *set_args("--epochs", "1"))
    assert run.code == 0, run
    assert {each["host"] for each in run.of("worker-joined")} == {"box-1", "box-2"}
    assert (tmp_path / "box-2/.psctl/host").is_dir()
