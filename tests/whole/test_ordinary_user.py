"""Users without privileges, on hosts and on one machine: jobs start, use the store of torch, resume, leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import ORDINARY_ID, PATH
from tests.helpers.running import ROOT, STEADY, Psctl, assert_clean, next_event, set_args

pytestmark = pytest.mark.whole

DDP = ROOT / "templates/ddp/job.yaml"


def test_jobs_of_a_user_without_privileges_run_on_hosts(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(2, ordinary=True)
    home = hosts.make_home(tmp_path / "home")
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    psctl = Psctl(home.path, environment=home.env)
    assert psctl.run("up", str(cluster)).code == 0
    checked = psctl.run("doctor", "-o", "json")
    assert checked.code == 0, checked

    plain = psctl.run("train", str(DDP), "--workers", "2", "-o", "jsonl")
    assert plain.code == 0, plain
    said = [event["text"] for event in plain.of("log") if "accuracy" in event["text"]]
    assert sorted(line.split(":")[0] for line in said) == ["rank 0 of 2", "rank 1 of 2"]

    served = psctl.run("train", str(STEADY), "--servers", "2", "-o", "jsonl", *set_args("--epochs", "2"))
    assert served.code == 0, served
    again = psctl.run(
        "checkpoint", "restore", f"{served.of('started')[0]['job']}@latest", "--workers", "1", "-o", "jsonl",
        *set_args("--epochs", "3"),
    )  # fmt: skip
    assert again.code == 0, again
    assert again.of("restored")[0]["step"] == 20

    forever = ["train", str(STEADY), "--servers", "1", "-d", "-o", "json", *set_args("--epochs", "500")]
    job = psctl.run(*forever).document["job"]
    with psctl.start("attach", job, "-o", "jsonl") as follower:
        next_event(follower, "progress")
        follower.kill()
    worker, server = (
        psctl.run("ssh", job, "-r", role, "--", "sh", "-c", "echo $RANK.") for role in ("worker:1", "server:0")
    )
    assert worker.out == "1.\n", worker
    assert server.out == ".\n", server
    assert "the process hides its environment: this is its folder" in server.err
    stopped = psctl.run("stop", job, "--force", "-o", "json")
    assert (stopped.code, stopped.document["state"], stopped.document["left"]) == (0, "stopped", [])
    log = psctl.run("attach", job, "-o", "jsonl")
    assert not [event for event in log.of("finished") if event["status"] != "stopped"], "no killed process wrote of it"
    for name in hosts:
        foreign = [path for path in hosts.path(name, "/root/.psctl").rglob("*") if path.lstat().st_uid != ORDINARY_ID]
        assert not foreign
    assert_clean(hosts)


@pytest.mark.parametrize("hidepid", ["off", "invisible"])
def test_a_user_without_privileges_trains_on_the_machine_itself(make_hosts: Callable[..., Any], hidepid: str) -> None:
    """With hidepid, as on shared machines, /proc shows a user no process that hides its memory, not even its own."""
    hosts = make_hosts(1, ordinary=True)
    hosts.exec("h1", ["mount", "-o", f"remount,hidepid={hidepid}", "/proc"])
    words = ["env", "-i", "-C", "/root", f"PATH={PATH}", "HOME=/root", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}"]
    done = subprocess.run(
        [*hosts.ordinary_command("h1"), *words, hosts.python, "-m", "psctl", "train", str(DDP), "--workers", "2",
         "-o", "jsonl"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert len([event for event in events if "accuracy" in event.get("text", "")]) == 2
    assert os.listdir(hosts.path("h1", "/root/.psctl")), "psctl ran there"
    assert_clean(hosts)
