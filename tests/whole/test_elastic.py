"""An elastic job goes on with fewer workers when a host is lost, and takes more when the host is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import JobOnHosts

pytestmark = [pytest.mark.whole, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_fewer_workers_train_until_the_host_is_back(
    make_hosts: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    job = JobOnHosts(make_hosts(3), tmp_path / "home", slots=1)
    more = [] if strategy == "ps" else ["--servers", "0", "--set", "replicas=auto"]
    job.train("--set", "workers={min: 2, max: 3}", "--set", f"sync.strategy={strategy}", *more)
    job.hosts.cut("h3")
    job.until(lambda: "worker/2" in job.lost(), "the loss", 60)
    job.wait_for_steps()
    assert bool(job.of("restored")) == (strategy == "ring"), "under ps the others continue at once"
    assert not job.of("recovering")
    before = len(job.of("restored"))
    job.hosts.heal("h3")
    job.until(lambda: job.notices("slots are free: from 2 to 3 workers"), "more workers", 120)
    if strategy == "ps":
        job.until(lambda: job.notices("worker/2 on h3 joined; 3 workers share the examples"), "the new worker", 60)
        job.until(lambda: job.notices("worker/2 on h3 trains"), "its first step", 10)
        assert len(job.of("restored")) == before, "no other worker starts again"
    else:
        job.until(lambda: len(job.of("restored")) > before, "the restart with them", 120)
        assert job.of("restored")[-1].get("lost", 0) == 0, "from a common step: none is repeated"
    job.wait_for_steps()
    (row,) = job.psctl.run("status", job.job, "-o", "json").document["jobs"]
    assert sum(rank["role"] == "worker" and rank["state"] == "running" for rank in row["ranks"]) == 3, row
    assert job.psctl.run("stop", job.job).code == 0
    job.check_clean()
