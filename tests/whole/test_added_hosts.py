"""A host that is new in the cluster file: `psctl up` makes it ready, and running jobs use it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, reference_values

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(900)]


def add_last_host(job: JobOnHosts) -> str:
    """Put all hosts into the cluster file, make the last one ready, and wait until the job may use it."""
    name = list(job.hosts)[-1]
    job.write_cluster()
    up = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert up.code == 0, up
    assert f"{job.job}: {name} was added to its hosts" in up.err, up
    job.until(lambda: job.notices(f"{name} was added to the job's hosts"), f"{name} in use", 60)
    again = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert again.code == 0, again
    assert job.job not in again.err, "it has all hosts, and an agent on each"
    return name


def test_a_new_host_takes_the_place_of_a_lost_one_and_votes(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    reference = reference_values(tmp_path / "undisturbed", 200, workers=3)
    job = JobOnHosts(make_hosts(4), tmp_path / "home", slots=1, first=3)
    job.train()
    job.until(lambda: job.standby, "the standby", 60)
    new = add_last_host(job)
    assert not job.of("worker-lost", "server-lost", "restored")
    job.hosts.crash("h2")
    job.until(job.lost, "the loss of h2", 60)
    job.until(job.is_recovered, "all that was lost made good")
    job.wait_for_steps(5)
    assert [host for host, _ in job.processes("worker")].count(new) == 1
    # two of the first three hosts, the head among them, are lost: another one leads because the new one votes
    job.until(lambda: job.standby in ("h3", new), "the standby", 60)
    time.sleep(10)  # no file shows that it votes
    job.hosts.crash("h1")
    job.until(lambda: job.head in ("h3", new), "another leader", 60)
    job.until(lambda: job.of("recovering") or job.of("restored"), "the wait for slots, or a restart", 120)
    stopped = job.psctl.run("stop", job.job, timeout=DEADLINE)
    assert stopped.code in (0, 10), stopped
    job.check_clean(("h1", "h2"))
    found = job.values()
    assert found == {epoch: reference[epoch] for epoch in found}


def test_a_host_is_added_by_the_file_and_the_psctl_of_the_job(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1, first=2)
    job.train()
    job.write_cluster()
    text = job.cluster.read_text()
    job.cluster.write_text(text.replace("  - {address: h2, name: h2, slots: 1}\n", ""))
    up = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert up.code == 0, up
    refusal = "h3 was not added to its hosts: in the cluster file h2, where the job runs, is another machine"
    assert f"{job.job}: {refusal}" in up.err, up
    assert "h2 does not lead" in ask_for_orders(job, "h2", 0)
    assert "is h1 itself" in ask_for_orders(job, "h1", 0)
    assert "the job has 2 hosts" in ask_for_orders(job, "h1", 5)
    job.write_cluster()
    add_last_host(job)
    assert job.psctl.run("stop", job.job, timeout=DEADLINE).code == 0
    job.check_clean()


def ask_for_orders(job: JobOnHosts, host: str, place: int) -> str:
    """Ask the agent of a host for the orders of another; return what it prints."""
    folder = f"/root/.psctl/host/jobs/{job.job}/{host}"
    agent = next(pid for where, pid in job.processes("agent") if where == host)
    code = dict(
        line.split("=", 1)
        for line in job.hosts.path(host, f"/proc/{agent}/environ").read_text().split("\0")
        if "=" in line
    )["PYTHONPATH"]
    asked = {"host": place, "added": None, **dict.fromkeys(("python", "code", "workdir", "job_dir", "code_dir"), "/")}
    program = [sys.executable, "-m", "psctl.agent.control_client", folder, "orders", json.dumps(asked)]
    done = job.hosts.exec(host, ["env", f"PYTHONPATH={code}", *program], check=False)
    assert done.returncode != 0, done
    return str(done.stdout + done.stderr)


def test_an_elastic_job_grows_onto_a_new_host(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1, first=2)
    job.train("--set", "workers={min: 1, max: 3}")
    new = add_last_host(job)
    job.until(lambda: [event["host"] for event in job.of("worker-joined")] == ["h1", "h2", new], "a third worker")
    job.wait_for_steps(5)
    status = job.psctl.run("status", job.job, "-o", "json", timeout=DEADLINE).document["jobs"][0]
    assert [rank["host"] for rank in status["ranks"] if (rank["role"], rank["rank"]) == ("worker", 2)] == [new]
    logs = job.psctl.run("logs", job.job, "-r", "worker:2", timeout=DEADLINE)
    assert logs.code == 0, logs
    stopped = job.psctl.run("stop", job.job, timeout=DEADLINE)
    assert stopped.code == 0, stopped
    assert job.of("finished")[-1]["failure"] is None
    job.check_clean()
