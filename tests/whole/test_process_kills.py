"""Twenty kills in one training: servers and workers die at random steps, and the values are those of a quiet run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, reference_values

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(1500)]

KILLS = 20


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of a run to which nothing happens."""
    return reference_values(tmp_path_factory.mktemp("undisturbed"), 200, workers=3)


def kill_one(job: JobOnHosts, chance: random.Random) -> str:
    """Kill one server or worker, whichever comes; return which it was."""
    kind = chance.choice(["server", "worker"])
    host, pid = chance.choice(job.until(lambda: len(job.processes(kind)) >= 3 and job.processes(kind), f"3 {kind}s"))
    before = len(job.lost())
    job.signal(host, pid, "KILL")
    job.until(lambda: len(job.lost()) > before, f"word of the {kind} on {host}")
    return str(job.lost()[before])


def test_twenty_kills_in_one_training(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job, chance = JobOnHosts(make_hosts(3), tmp_path / "home"), random.Random(20)
    job.train()
    killed = []
    for _ in range(KILLS):
        job.wait_for_steps(chance.randrange(1, 12))
        job.until(job.is_recovered, "all that was lost made good")
        killed.append(kill_one(job, chance))
    job.until(job.is_recovered, "all that was lost made good")
    job.wait_for_steps()
    compared = job.stop_and_check(reference)
    back = len(job.of("restored"))
    assert back <= killed.count("worker/0"), (
        "worker/0 alone may die with what no server has: its state of the next clock"
    )
    job.report(f"killed: {' '.join(killed)}; {back} times back to a checkpoint; {compared} epochs compared")


def test_servers_come_and_go_by_scale_while_others_are_killed(
    make_hosts: Callable[..., Any], tmp_path: Path, reference: dict[int, str]
) -> None:
    job, chance = JobOnHosts(make_hosts(3), tmp_path / "home"), random.Random(7)
    job.train()
    for servers in (5, 3, 4, 2, 3):
        answer = job.until(lambda servers=servers: _scaled(job, servers), f"psctl scale --servers {servers}", DEADLINE)
        job.wait_for_steps(chance.randrange(1, 8))
        host, pid = chance.choice(job.processes("server"))
        job.signal(host, pid, "KILL")
        job.wait_for_steps()
        assert answer
    job.stop_and_check(reference)
    job.report(f"lost {job.lost()}; {len(job.of('restored'))} times back to a checkpoint")


def _scaled(job: JobOnHosts, servers: int) -> bool:
    """Ask for so many servers; False while others come or go."""
    done = job.psctl.run("scale", job.job, "--servers", str(servers), timeout=DEADLINE)
    assert done.code in (0, 2), done
    return done.code == 0
