"""Two workers a host on real hosts: what they push to another host's server crosses the network once, and a worker or
a server that is killed in the midst costs neither an example nor a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_on_hosts import DEADLINE, JobOnHosts, steady_args
from tests.helpers.running import STEADY, Psctl

pytestmark = pytest.mark.whole

STEPS = 50
WIDTH = 20_000
GRADIENT = 12 * WIDTH * 4  # bytes: two linear layers, and one that normalises


def trained(psctl: Psctl, cluster: Path, *more: str) -> None:
    run = psctl.run(
        "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", "2", "--servers", "1",
        *steady_args(STEPS // 10, 0.0, "--width", str(WIDTH)), "--set", "replicas=0",
        "--set", "checkpoint.every=null", "--set", "checkpoint.on_stop=false", *more, timeout=DEADLINE,
    )  # fmt: skip
    assert run.code == 0, run
    assert run.of("finished")[0]["steps"] == STEPS


@pytest.mark.soak  # tests/ps/test_host_pushes.py has the sums
@pytest.mark.parametrize(
    ("consistency", "times"),
    [("bsp", 1), pytest.param("{ssp: 1}", 2, marks=pytest.mark.soak)],  # out of step each pushes on its own
)
def test_what_two_workers_of_a_host_push_crosses_the_network_once(
    make_hosts: Callable[..., Any], tmp_path: Path, consistency: str, times: int
) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    text: str = hosts.cluster_text(["h1"])
    rows = "  - {address: h1, roles: [server]}\n  - {address: h2, slots: 2, roles: [worker]}\n"
    cluster.write_text(text[: text.index("hosts:")] + "hosts:\n" + rows)
    assert psctl.run("up", str(cluster), timeout=DEADLINE).code == 0  # measures the links, which are bytes too
    before = hosts.sent("h2", "eth0")
    trained(psctl, cluster, "--set", f"sync.consistency={consistency}")
    moved = hosts.sent("h2", "eth0") - before
    each = moved / (STEPS * GRADIENT)  # and rank 0's buffers, and what TCP says of the values that come
    assert times <= each < times + 0.5, f"{moved / STEPS:.0f} bytes a step"


@pytest.fixture
def pairs(make_hosts: Callable[..., Any], tmp_path: Path) -> Callable[[str], JobOnHosts]:
    """Make a job that trains with two workers and a server on each of two hosts."""

    def make(name: str, pause: float) -> JobOnHosts:
        made = JobOnHosts(make_hosts(2), tmp_path / name)
        made.train("--set", "workers={per_host: 2}", pause=pause)
        return made

    return make


@pytest.mark.soak  # test_restore_numbers.py kills a server, tests/sync/test_replacement.py workers at every point
def test_workers_and_servers_that_are_killed_cost_no_example_and_no_bit(pairs: Callable[..., JobOnHosts]) -> None:
    undisturbed = pairs("undisturbed", 0.0)
    undisturbed.until(lambda: len(undisturbed.values()) >= 30, "thirty epochs")
    reference = undisturbed.values()
    undisturbed.stop_and_check(reference)
    job = pairs("killed", 0.05)
    for kind, which in (("worker", 1), ("worker", 2), ("server", 1), ("worker", 0)):
        if (kind, which) == ("worker", 0):  # what it alone knows may not be with the servers yet: docs/failures.md
            assert not job.of("restored"), "those that died were replaced"
        host, pid = job.processes(kind)[which]
        lost = len(job.lost())
        job.signal(host, pid, "KILL")
        job.until(lambda lost=lost: len(job.lost()) > lost, "word of the loss")  # type: ignore[misc]
        job.wait_for_steps()
    assert job.stop_and_check(reference) >= 5
