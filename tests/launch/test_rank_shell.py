"""The shell beside a process of a job: its environment and folder, and the command that reaches its host."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from psctl.errors import UsageError
from psctl.launch.home import HostRecord, JobRecord, KnownCluster, ReportedRank
from psctl.launch.jobs.rank_shell import RankPlace, command, find
from psctl.spec.cluster import ClusterSpec, load_cluster

HOSTS = [HostRecord("node-a", "/w", "/w/jobs/d-1/node-a", "/venv/bin/python", "/w/code")]


def record(*ranks: ReportedRank, state: str = "done") -> JobRecord:
    cluster = KnownCluster("lab", "", "", 0.0)
    return JobRecord("d-1", "d", 1.0, cluster, HOSTS, "", "job.yaml", ".", "c0", "", ranks=list(ranks), state=state)


def cluster(more: str = "") -> ClusterSpec:
    return load_cluster(f"version: 1\nname: lab\n{more}hosts: [{{address: 10.0.0.7, name: node-a, port: 2222}}]\n", "c")


def test_what_the_cluster_file_says_is_passed_to_ssh() -> None:
    spec = cluster("ssh: {user: me, identity_file: /k, proxy_jump: gate, host_key_policy: accept-new}\n")
    words = command(spec, "d-1", RankPlace(HOSTS[0], 42), ["echo", "two  words"], terminal=True)
    assert words[:-1] == [
        "ssh", "-t", "-l", "me", "-p", "2222", "-i", "/k", "-J", "gate", "-o", "ConnectTimeout=10",
        "-o", "StrictHostKeyChecking=accept-new",
        "--", "10.0.0.7",
    ]  # fmt: skip
    there = shlex.split(words[-1])
    assert there[:2] == ["/venv/bin/python", "-c"]
    assert there[3:] == ["d-1", "42", "/w/jobs/d-1/node-a/files", "echo", "two  words"]


def test_a_process_that_the_job_does_not_have_is_refused() -> None:
    known = record(ReportedRank("worker", 0, "node-a", 42))
    assert find(known, None, "worker", 0) == RankPlace(HOSTS[0], 42)
    with pytest.raises(UsageError, match="d-1 has no worker:1") as caught:
        find(known, None, "worker", 1)
    assert caught.value.hint == "it has worker:0"


def test_the_command_runs_in_the_folder_and_environment_of_the_process(tmp_path: Path) -> None:
    spec = load_cluster("version: 1\nname: l\nhosts: [{address: local, name: node-a}]\n", "c")
    here = HostRecord("node-a", "/w", str(tmp_path), sys.executable, "/w/code")
    (tmp_path / "inside").mkdir()
    (tmp_path / "files").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path / "inside",
        env={"PSCTL_JOB": "d-1", "RANK": "7", "PSCTL_ORDERS": "/secret", "PATH": os.environ["PATH"]},
    ) as running:  # fmt: skip
        try:
            words = ["sh", "-c", "echo $RANK ${PSCTL_ORDERS-none}; pwd; exit 5"]
            time.sleep(0.2)  # until it has its own environment
            done = subprocess.run(
                command(spec, "d-1", RankPlace(here, running.pid), words, terminal=False),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            running.kill()
    assert (done.returncode, done.stdout) == (5, f"7 none\n{tmp_path}/inside\n"), done
    gone = subprocess.run(
        command(spec, "d-1", RankPlace(here, running.pid), ["pwd"], terminal=False),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (gone.returncode, gone.stdout) == (0, f"{tmp_path}/files\n"), gone
    assert "does not run" in gone.stderr
