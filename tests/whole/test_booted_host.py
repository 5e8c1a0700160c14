"""A host that booted has no agent any more: `psctl up` starts one again, and the job uses the host again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, reference_values

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a run to which nothing happens."""
    return reference_values(tmp_path_factory.mktemp("undisturbed"), 200, workers=3)


def boot(job: JobOnHosts, host: str) -> None:
    """Boot a host, and make it ready again once the job has lost it."""
    before = len(job.of("worker-lost", "server-lost"))
    back = len(job.notices(f"{host} is back"))
    job.hosts.boot(host)
    job.until(lambda: len(job.of("worker-lost", "server-lost")) > before, f"the loss of {host}", 60)
    job.until(job.is_recovered, "all that was lost made good")
    up = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert up.code == 0, up
    assert f"{job.job}: its agent on {host} was started again; the job may use the host" in up.err, up
    try:
        job.until(lambda: len(job.notices(f"{host} is back")) > back, f"{host} in use", 60)
    except AssertionError as error:
        log = job.hosts.path(host, f"/root/.psctl/host/jobs/{job.job}/{host}/agent.log").read_text()
        raise AssertionError(f"{error}\nits agent: {log[-2000:]}\n{job.hosts.processes(host)}") from None


def test_a_booted_host_is_used_again(make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train()
    job.until(lambda: job.standby, "the standby", 60)
    boot(job, "h3")
    job.wait_for_steps(5)
    again = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert again.code == 0, again
    assert "started again" not in again.err, "every agent runs"
    boot(job, "h2")
    job.wait_for_steps(5)
    # of three hosts two were lost; they are back and vote, so the loss of the first, the head, is survived
    job.until(lambda: job.standby, "the standby", 60)
    job.hosts.crash("h1")
    job.until(lambda: job.head != "h1", "another leader", 60)
    job.until(job.is_recovered, "all that was lost made good")
    job.wait_for_steps(5)
    job.stop_and_check(reference, but=("h1",))


def test_the_head_is_booted(make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train()
    job.until(lambda: job.standby, "the standby", 60)
    boot(job, "h1")
    assert job.head != "h1"
    job.wait_for_steps(5)
    job.stop_and_check(reference)


def test_a_job_that_waits_for_a_booted_host_goes_on(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1)
    job.train()
    job.hosts.boot("h3")
    job.until(lambda: job.of("recovering"), "the wait for h3", 90)
    up = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert up.code == 0, up
    job.until(lambda: job.of("recovered") and job.of("restored"), "the restart", 120)
    job.wait_for_steps(5)
    job.stop_and_check(reference)
