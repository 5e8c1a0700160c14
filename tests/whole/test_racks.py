"""Two racks of two hosts: gradients and values cross between them once each way, and processes that are killed in the
midst cost neither an example nor a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, steady_args
from tests.helpers.running import STEADY, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]  # tests/client/test_rack_sums.py has sums, pulls and failures

STEPS = 50
WIDTH = 20_000
GRADIENT = 12 * WIDTH * 4  # bytes: two linear layers, and one that normalises
HOSTS = """\
  - {address: h1, labels: {rack: r1}}
  - {address: h2, labels: {rack: r1}}
  - {address: h3, labels: {rack: r2}}
  - {address: h4, labels: {rack: r2}}
links: [{between: [r1, r2], bandwidth: 100 Mbit/s}]
"""


def in_racks(hosts: Any) -> str:
    """Return a cluster file with two racks."""
    text: str = hosts.cluster_text()
    return text[: text.index("hosts:")] + "hosts:\n" + HOSTS


def test_bytes_between_racks_fall_by_the_workers_of_a_rack(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(4, far=("h3", "h4"), trunk="100mbit")
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    cluster.write_text(in_racks(hosts))
    assert psctl.run("up", str(cluster), timeout=DEADLINE).code == 0
    moved, reasons = {}, {}
    for sums in ("host", "auto"):
        before = hosts.between_racks()
        run = psctl.run(
            "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", "4", "--servers", "4",
            *steady_args(STEPS // 10, 0.0, "--width", str(WIDTH)), "--set", "replicas=0", "--set", f"sync.sums={sums}",
            "--set", "checkpoint.every=null", "--set", "checkpoint.on_stop=false", timeout=DEADLINE,
        )  # fmt: skip
        assert run.code == 0, run
        moved[sums] = (hosts.between_racks() - before) / (STEPS * GRADIENT)
        reasons[sums] = run.of("plan")[-1]["reason"]
    assert "summed in each rack" not in reasons["host"]
    assert "summed in each rack" in reasons["auto"]
    # Each rack holds half of the values; four workers push and pull the other half, or one of each rack does.
    assert 4 <= moved["host"] < 5, moved
    assert 2 <= moved["auto"] < 3, moved


def test_processes_of_racks_that_are_killed_cost_no_example_and_no_bit(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    def started(name: str, pause: float) -> JobOnHosts:
        hosts = make_hosts(4)
        made = JobOnHosts(hosts, tmp_path / name)
        made.cluster.write_text(in_racks(hosts).replace("labels:", "slots: 2, labels:"))
        made.train("--set", "sync.sums=rack", "--set", "servers=4", pause=pause)
        return made

    undisturbed = started("undisturbed", 0.0)
    undisturbed.until(lambda: len(undisturbed.values()) >= 30, "thirty epochs")
    reference = undisturbed.values()
    undisturbed.stop_and_check(reference)
    job = started("killed", 0.05)
    for kind, which in (("worker", 3), ("worker", 1), ("server", 2), ("worker", 2)):
        host, pid = job.processes(kind)[which]
        lost = len(job.lost())
        job.signal(host, pid, "KILL")
        job.until(lambda lost=lost: len(job.lost()) > lost, "word of the loss")  # type: ignore[misc]
        job.wait_for_steps()
    assert not job.of("restored"), "those that died were replaced"
    assert job.stop_and_check(reference) >= 5
