"""Two workers a host on real hosts: what they push to another host's server crosses the network once, and a worker or
a server that is killed in the midst costs neither an example nor a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lived import LONG, Lived, words
from tests.helpers.running import STEADY, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.timeout(400)]

STEPS = 100
WIDTH = 20_000
GRADIENT = 12 * WIDTH * 4  # bytes: two linear layers, and one that normalises


def sent(hosts: Any, name: str) -> int:
    """Return the bytes that a host's network interface has sent."""
    lines: list[str] = hosts.exec(name, ["cat", "/proc/net/dev"]).stdout.splitlines()
    return sum(
        int(line.split(":")[1].split()[8]) for line in lines if ":" in line and not line.strip().startswith("lo")
    )


def trained(psctl: Psctl, cluster: Path, *more: str) -> None:
    run = psctl.run(
        "train", str(STEADY), "--cluster", str(cluster), "-o", "jsonl", "--workers", "4", "--servers", "1",
        *words(STEPS // 10, 0.0, "--width", str(WIDTH)), "--set", "replicas=0", *more, timeout=LONG,
    )  # fmt: skip
    assert run.code == 0, run
    assert run.of("finished")[0]["steps"] == STEPS


def test_what_two_workers_of_a_host_push_crosses_the_network_once(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    home = hosts.make_home(tmp_path / "home")
    psctl, cluster = Psctl(home.path, environment=home.env), home.path / "cluster.yaml"
    text: str = hosts.cluster_text(["h1"])
    rows = "".join(f"  - {{address: {name}, name: {name}, slots: 2, roles: [worker]}}\n" for name in ("h1", "h2"))
    cluster.write_text(text[: text.index("hosts:")] + "hosts:\n" + rows + "  - {address: h3, roles: [server]}\n")
    assert psctl.run("up", str(cluster), timeout=LONG).code == 0  # measures the links, which are bytes too
    moved = []
    for more in ((), ("--set", "sync.consistency={ssp: 1}")):  # out of step each pushes for himself
        before = sent(hosts, "h2")
        trained(psctl, cluster, *more)
        moved.append(sent(hosts, "h2") - before)
    together, apart = moved
    assert apart > 2 * STEPS * GRADIENT
    assert together < 0.56 * apart, f"{together / STEPS:.0f} bytes a step, against {apart / STEPS:.0f}"


@pytest.fixture
def pairs(make_hosts: Callable[..., Any], tmp_path: Path) -> Callable[[str], Lived]:
    """Make a job that trains with two workers and a server on each of two hosts."""

    def make(name: str, pause: float) -> Lived:
        made = Lived(make_hosts(2), tmp_path / name)
        made.train("--set", "workers={per_host: 2}", pause=pause)
        return made

    return make


@pytest.mark.soak  # test_restore_numbers.py kills a server, tests/sync/test_replacement.py workers at every point
def test_workers_and_servers_that_are_killed_cost_no_example_and_no_bit(pairs: Callable[..., Lived]) -> None:
    undisturbed = pairs("undisturbed", 0.0)
    undisturbed.until(lambda: len(undisturbed.values()) >= 30, "thirty epochs")
    reference = undisturbed.values()
    undisturbed.ends_right(reference)
    job = pairs("killed", 0.05)
    for kind, which in (("worker", 1), ("worker", 2), ("server", 1), ("worker", 0)):
        if (kind, which) == ("worker", 0):  # what it alone knows may not be with the servers yet: docs/failures.md
            assert not job.of("restored"), "those that died were replaced"
        host, pid = job.processes(kind)[which]
        lost = len(job.lost())
        job.signal(host, pid, "KILL")
        job.until(lambda lost=lost: len(job.lost()) > lost, "word of the loss")  # type: ignore[misc]
        job.goes_on()
    assert job.ends_right(reference) >= 5
