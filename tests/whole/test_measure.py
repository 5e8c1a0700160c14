"""Real links of set rates: what psctl measures of them, which of two links a job takes, and what `up` keeps."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl.launch.clusters import choose_cluster
from psctl.launch.home import Home
from psctl.launch.hosts.converge import ReachedCluster, inspect
from psctl.launch.measure import link_measurement, reach
from psctl.remote.fleet import Fleet
from tests.helpers.hosts import PATH
from tests.helpers.running import Ended, Psctl, until

pytestmark = pytest.mark.whole

SHOWS = """
import json, os
import torch
import psctl
run = psctl.init()
net = torch.nn.Linear(1000, 1000)
net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(4):
    net(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
print("ENV", json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""

MBIT = 1e6 / 8

STEADY = link_measurement.MeasurementEffort(seconds=0.4, burn=0.15, repeats=3, pings=50)
"""Between what `up` and what `topo --measure` spends."""


class Lab:
    """psctl on the driving side of test hosts."""

    def __init__(self, hosts: Any, folder: Path, more: str = "") -> None:
        self.hosts, self.folder = hosts, folder
        self.home = hosts.make_home(folder / "home")
        self.cluster = self.home.path / "cluster.yaml"
        self.cluster.write_text(hosts.cluster_text(more=more))
        self.psctl = Psctl(self.home.path, environment=self.home.env)

    def up(self, *words: str) -> Ended:
        done = self.psctl.run("up", str(self.cluster), "-o", "json", *words)
        assert done.code == 0, done
        return done

    def actions(self, *words: str) -> dict[str, list[str]]:
        return {host["name"]: host["actions"] for host in self.up(*words).document["hosts"]}

    def measured(
        self, effort: link_measurement.MeasurementEffort = link_measurement.QUICK
    ) -> tuple[ReachedCluster, link_measurement.Measurements]:
        """What was found, and what this process measures of it."""
        with self._found() as reached:
            return reached, link_measurement.measure(reached, lambda *_: None, effort)

    def reached(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What probing settled, and the address of each host that follows."""
        with self._found() as reached:
            return reached.addresses, reach.addresses(reached)

    @contextlib.contextmanager
    def _found(self) -> Iterator[ReachedCluster]:
        home = Home(self.folder / "own")
        chosen = choose_cluster(home, str(self.cluster))
        with inspect(home, chosen, lambda chosen, _: Fleet.connect(chosen.spec, config=self.home.config)) as reached:
            reach.find(reached, lambda *_: None)
            yield reached

    def assert_clean(self) -> None:
        until(lambda: not any(self.hosts.leftovers(name) for name in self.hosts), 10, name="nothing is left")

    def train(self) -> tuple[Ended, list[dict[str, str]]]:
        """A job that prints the interface that it was given."""
        folder = self.folder / "job"
        folder.mkdir(exist_ok=True)
        (folder / "show.py").write_text(SHOWS)
        (folder / "job.yaml").write_text("version: 1\nname: show\nscript: show.py\nsync: {strategy: native}\n")
        done = self.psctl.run("train", str(folder / "job.yaml"), "--cluster", str(self.cluster), "-o", "jsonl")
        assert done.code == 0, done
        said = [event["text"] for event in done.of("log") if event["text"].startswith("ENV ")]
        return done, [json.loads(text.removeprefix("ENV ")) for text in said]


@pytest.fixture
def lab(make_hosts: Any, tmp_path: Path) -> Any:
    """Make test hosts with psctl beside them."""

    def make(*arguments: Any, more: str = "", **options: Any) -> Lab:
        return Lab(make_hosts(*arguments, **options), tmp_path, more)

    return make


def iperf(hosts: Any, source: str, target: str) -> float:
    """Payload bytes/s that iperf3 moves between two hosts."""
    address = hosts[target].address
    serve = [*hosts.command(target), "env", "-i", f"PATH={PATH}", "iperf3", "-s", "-1", "-B", address, "--forceflush"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            assert server.poll() is None
        done = hosts.exec(source, ["iperf3", "-c", address, "-t", "2", "--omit", "1", "-J"])
        server.communicate()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def test_each_host_has_the_rate_that_was_set_and_that_iperf3_sees(lab: Any) -> None:
    lab = lab(3, rate={"h1": "200mbit", "h2": "50mbit", "h3": "200mbit"})
    reached, found = lab.measured(STEADY)
    edges = {edge.a: edge for edge in link_measurement.between(reached, found)}
    assert {edge.b for edge in edges.values()} == {"network"}
    rates = [edges[name].bandwidth for name in ("h1", "h2", "h3")]
    assert rates == pytest.approx(
        [0.956 * rate * MBIT for rate in (200, 50, 200)], rel=0.1
    )  # bench/links.py is for the last per cent
    assert all(edge.measured and edge.via == "eth0" for edge in edges.values())
    assert all(0 < edge.latency < 0.05 for edge in edges.values()), "a busy machine answers late, but it answers"
    assert found.missing == ()
    lab.assert_clean()
    if shutil.which("iperf3"):
        assert edges["h3"].bandwidth == pytest.approx(iperf(lab.hosts, "h1", "h3"), rel=0.1)


@pytest.mark.soak
def test_two_racks_and_the_trunk_that_they_share(lab: Any) -> None:
    lab = lab(4, rate="100mbit", far=("h3", "h4"), trunk="50mbit")
    reached, found = lab.measured()
    edges = {(edge.a, edge.b): edge.bandwidth for edge in link_measurement.between(reached, found)}
    assert ("switch1", "switch2") in edges, found.series
    assert edges.pop(("switch1", "switch2")) == pytest.approx(0.956 * 50 * MBIT, rel=0.08)
    assert edges == pytest.approx(
        {(name, "switch1" if name in ("h1", "h2") else "switch2"): 0.956 * 100 * MBIT for name in lab.hosts}, rel=0.08
    )


@pytest.mark.soak  # tests/launch/test_link_measurement.py: what is kept, and when it is dropped
def test_what_up_measured_is_kept_for_plans_until_down(lab: Any) -> None:
    lab = lab(3, rate="100mbit")
    kept = lab.home.path / ".psctl/measured/links/lab.json"
    assert {actions[-1] for actions in lab.actions().values()} == {"measure the links to 2 hosts"}
    before = kept.read_bytes()
    plan = lab.psctl.run("plan", "--size", "100MB", "-o", "json").document
    ring = next(each for each in plan["candidates"] if each["strategy"] == "native")
    assert ring["seconds"] == pytest.approx(2 * 2 / 3 * 100e6 / (0.956 * 100 * MBIT), rel=0.1)
    assert kept.read_bytes() == before
    lab.assert_clean()
    assert lab.psctl.run("down").code == 0
    assert not kept.exists()


@pytest.mark.soak
def test_train_measures_as_up_does_and_of_two_links_a_job_trains_over_the_fast_one(lab: Any) -> None:
    lab = lab(2, rate="10mbit", second="300mbit")
    planned = lab.actions("--dry-run")
    assert {tuple(actions[-2:]) for actions in planned.values()} == {
        ("find the network by which the hosts reach each other", "measure the link to 1 host")
    }
    slow, fast = ({name: lab.hosts.sent(name, link) for name in lab.hosts} for link in ("eth0", "eth1"))
    done, said = lab.train()
    assert {(each["GLOO_SOCKET_IFNAME"], each["NCCL_SOCKET_IFNAME"]) for each in said} == {("eth1", "eth1")}
    assert len(said) == 2
    for name in lab.hosts:
        assert lab.hosts.sent(name, "eth1") - fast[name] > 4 * 2_000_000, done
    doctor = lab.psctl.run("doctor", str(lab.cluster), "-o", "json")
    rows = [check for host in doctor.document["hosts"] for check in host["checks"] if check["check"] == "interface"]
    assert all(row["detail"].startswith("eth1 ") and "eth0" in row["detail"] for row in rows), rows
    assert all(lab.hosts.sent(name, "eth0") - slow[name] < 4_000_000 for name in lab.hosts)
    plan = done.of("plan")[-1]
    native = next(each for each in plan["candidates"] if each["strategy"] == "native")
    assert native["seconds"] == pytest.approx(plan["size"] / (0.956 * 300 * MBIT), rel=0.15), "two ranks: 2 x 1/2"
    assert (lab.home.path / ".psctl/measured/links/lab.json").exists()
    clusters = {row["name"]: row for row in lab.psctl.run("clusters", "-o", "json").document["clusters"]}
    assert (clusters["lab"]["state"], clusters["lab"]["current"]) == ("ready", False)
    assert {tuple(actions) for actions in lab.actions().values()} == {()}, "up finds nothing left to do"


def test_of_two_links_the_broken_one_is_not_taken(lab: Any) -> None:
    lab = lab(3, second="")
    lab.hosts.cut("h2", 1)
    settled, addresses = lab.reached()
    assert settled == addresses
    assert {name: (one.interface, one.address) for name, one in settled.items()} == {
        name: ("eth0", lab.hosts[name].address) for name in lab.hosts
    }


def test_what_the_cluster_file_names_is_taken_unprobed(lab: Any) -> None:
    lab = lab(2, rate="10mbit", second="300mbit", more="network: {interface: eth0}\n")
    settled, addresses = lab.reached()
    assert settled == {}
    assert {name: one.address for name, one in addresses.items()} == {
        name: lab.hosts[name].address for name in lab.hosts
    }
