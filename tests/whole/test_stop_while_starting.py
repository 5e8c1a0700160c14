"""A job is stopped while the agent of a host is still starting: nothing of it is left, and `stop` succeeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import Psctl, assert_clean, until

pytestmark = pytest.mark.whole

ENDLESS = "import threading\nprint('begun', flush=True)\nthreading.Event().wait()\n"


def agents(hosts: Any, name: str) -> list[int]:
    return [pid for pid, line in hosts.processes(name) if line.split()[1:3] == ["-m", "psctl.agent.main"]]


def finished(hosts: Any, job: str) -> bool:
    path = hosts.path("h1", f"/root/.psctl/host/jobs/{job}/h1/events.jsonl")
    return path.exists() and '"event":"finished"' in path.read_text()


@pytest.mark.soak  # tests/launch/test_pending_orders.py; test_agents.py ends psctl while a job starts
def test_an_agent_that_starts_after_the_end_of_its_job_is_ended_too(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl = Psctl(home.path, environment=home.env)
    runtime = f"runtime: {{python: {hosts.python}, environment: existing}}\n"
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text(more=runtime))
    (home.path / "train.py").write_text(ENDLESS)
    file = home.path / "job.yaml"
    file.write_text("version: 1\nname: plain\nscript: train.py\nworkers: 2\n")
    assert psctl.run("up", str(cluster)).code == 0
    with psctl.start("train", str(file), "-d", "-o", "json", "--cluster", str(cluster)) as starting:
        late = until(lambda: agents(hosts, "h2"), 60, every=0.005, name="an agent on h2")
        hosts.exec("h2", ["kill", "-STOP", *map(str, late)])
        out, err = starting.communicate(timeout=120)
    assert starting.returncode == 0, err
    job = json.loads(out)["job"]
    with psctl.start("stop", job, "-o", "json") as stopping:
        until(lambda: finished(hosts, job) or stopping.poll() is not None, 120, name="the end of the job")
        hosts.exec("h2", ["kill", "-CONT", *map(str, late)], check=False)  # psctl may have killed it
        out, err = stopping.communicate(timeout=120)
    assert stopping.returncode == 0, err
    assert_clean(hosts)
