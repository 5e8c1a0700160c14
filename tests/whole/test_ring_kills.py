"""Workers of a ring are killed at random moments: no other starts again, and the values are those of a quiet run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import JobOnHosts, reference_values

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1500)]

KILLS = 20
STRATEGY = "ring"
COLLECTIVE = ("--servers", "0", "--set", "replicas=auto", "--set", f"sync.strategy={STRATEGY}")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a run to which nothing happens."""
    return reference_values(tmp_path_factory.mktemp("undisturbed"), 200, workers=3, strategy=STRATEGY)


def kill(job: JobOnHosts, host: str, pid: int) -> float:
    """Kill a worker; return the seconds until training went on."""
    before, step = len(job.lost()), job.step
    job.signal(host, pid, "KILL")
    began = time.monotonic()
    job.until(lambda: len(job.lost()) > before, f"word of the worker on {host}")
    step = job.step
    job.until(lambda: job.is_recovered() and job.step > step + 1, "training goes on")
    return time.monotonic() - began


@pytest.mark.soak
def test_killed_workers_are_replaced_and_nobody_else_starts_again(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train(*COLLECTIVE)
    seconds = []
    for host in ("h1", "h3"):
        pids = dict(job.until(lambda: len(job.processes("worker")) == 3 and job.processes("worker"), "3 workers"))
        seconds.append(kill(job, host, pids[host]))
        assert not job.of("restored"), [each["text"] for each in job.of("notice")]
        after = dict(job.processes("worker"))
        assert {each for each in after if after[each] == pids[each]} == {"h1", "h2", "h3"} - {host}
    compared = job.stop_and_check(reference)
    assert not job.of("restored"), "nobody goes back to a checkpoint"
    job.report(f"{compared} epochs compared; went on after {', '.join(f'{one:.1f}' for one in seconds)} s")


@pytest.mark.soak
def test_twenty_kills_in_one_ring(make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]) -> None:
    job, chance = JobOnHosts(make_hosts(3), tmp_path / "home"), random.Random(21)
    job.train(*COLLECTIVE)
    seconds = []
    for _ in range(KILLS):
        job.wait_for_steps(chance.randrange(6, 15))
        time.sleep(chance.random() * 0.3)
        host, pid = chance.choice(job.until(lambda: len(job.processes("worker")) == 3 and job.processes("worker"), "3"))
        seconds.append(kill(job, host, pid))
    compared = job.stop_and_check(reference)
    assert not job.of("restored"), "nobody goes back to a checkpoint"
    job.report(
        f"{compared} epochs compared; lost {' '.join(job.lost())}; went on after {statistics.median(seconds):.1f} s "
        f"(median), at most {max(seconds):.1f} s"
    )


@pytest.mark.soak
def test_the_workers_of_a_lost_host_are_started_on_another(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home")
    job.train(*COLLECTIVE)
    job.hosts.crash("h3")
    began = time.monotonic()
    job.until(lambda: "worker/2" in job.lost(), "the loss", 60)
    step = job.step
    job.until(lambda: job.is_recovered() and job.step > step + 1, "training goes on")
    seconds = time.monotonic() - began
    compared = job.stop_and_check(reference, but=("h3",))
    assert not job.of("restored"), "nobody goes back to a checkpoint"
    job.report(f"{compared} epochs compared; went on after {seconds:.1f} s")
