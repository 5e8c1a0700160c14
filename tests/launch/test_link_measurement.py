"""What is kept of measured links, when it still holds, and what it means beside nominal rates and `links:`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.errors import HostUnreachable
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import Home, KnownCluster
from psctl.launch.hosts.actions import HostNeeds, MeasureLinks
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.hosts.site import HostSite, RunningJob
from psctl.launch.measure import calibration, link_measurement, reach
from psctl.launch.measure.calibration import MeasuredSum
from psctl.launch.measure.link_measurement import Measurements
from psctl.launch.placement.cluster_snapshot import machines_of
from psctl.message_costs import UNKNOWN_COSTS, Costs
from psctl.remote.fleet import Fleet
from psctl.remote.shell import CommandResult
from psctl.spec.cluster import load_cluster
from psctl.topology.facts import Gpu, HostFacts, Nic
from psctl.topology.graph import Between, Link
from psctl.topology.network.addresses import ChosenAddress as Address
from psctl.topology.network.fabric import ConcurrentSamples, PairSample
from psctl.topology.readers.probe import parse_probe
from psctl.types import HostName
from tests.helpers.fake_shell import FakeShell

G = 125e6
NOMINAL = 10 * G * link_measurement.PAYLOAD


def facts(number: int, nics: int = 1, gpus: int = 0) -> HostFacts:
    return msgspec.structs.replace(
        parse_probe(""), connected=f"10.0.0.{number}", boot=f"boot-{number}",
        nics=tuple(Nic(f"eth{each}", (f"10.0.{each}.{number}/24",), speed=10 * G) for each in range(nics)),
        gpus=tuple(Gpu(index, "A100", 80 * 10**9, "550", f"0000:0{index}:00.0", 1) for index in range(gpus)),
    )  # fmt: skip


def reached(
    *names: str,
    home: Home | None = None,
    chosen: ChosenCluster | None = None,
    fleet: Fleet | None = None,
    nics: int = 1,
    gpus: int = 0,
) -> ReachedCluster:
    """Return a cluster of inspected hosts, all of them ready."""
    sites = {
        name: HostSite(
            name=name, facts=facts(number, nics, gpus), executable="python3", version="3.11.4", paths=[], modules={},
            cuda=None, workdir="/w", free=1, writable=True, open=None, skew=0.0, codes={},
            environments={}, ready={"python": "/w/python"}, jobs=[], names=[], cores=8,
        )
        for number, name in enumerate(names, 1)
    }  # fmt: skip
    wants = HostNeeds(code="c", code_size=1, managed=False, torch=None)
    fleet = fleet or Fleet({}, {})
    return ReachedCluster(
        home or Home(Path("/nowhere")), chosen or cluster(), lambda *_: fleet, fleet, wants, {}, sites,
        plans={name: [] for name in names}, failed={},
    )  # fmt: skip


def cluster(more: str = "", hosts: str = "[a, b, c]") -> ChosenCluster:
    text = f"name: lab\nhosts: {hosts}\n{more}"
    return ChosenCluster(load_cluster(text, "lab.yaml"), KnownCluster("lab", "/lab.yaml", text, 1.0))


def measured(*names: str, rate: float = 9 * G, spread: float = 0.0) -> Measurements:
    """Every pair alone, all at one rate."""
    pairs = [(a, b) for a in names for b in names if a != b]
    series = tuple(ConcurrentSamples((PairSample(a, b, rate, 2e-5, spread),)) for a, b in pairs)
    return Measurements(
        5.0, {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}, series,
        machines={name: site.identity for name, site in reached(*names).sites.items()},
    )  # fmt: skip


def test_without_measurements_rates_are_nominal() -> None:
    assert link_measurement.between(reached("a", "b"), None) == tuple(
        Between(name, "network", NOMINAL, 1e-4, via="eth0") for name in "ab"
    )
    assert link_measurement.between(reached("a"), None) == ()


def test_what_was_measured_stands_in_place_of_nominal_rates(tmp_path: Path) -> None:
    found = reached("a", "b", "c", home=Home(tmp_path))
    assert {each.rate for each in machines_of(found).values()} == {NOMINAL}
    link_measurement.save(found, measured("a", "b", "c"))
    kept = link_measurement.load(found)
    assert kept == measured("a", "b", "c")
    assert {(each.b, each.bandwidth, each.measured, each.via) for each in link_measurement.between(found, kept)} == {
        ("network", 9 * G, True, "eth0")
    }
    assert {name: each.rate for name, each in machines_of(found).items()} == dict.fromkeys("abc", 9 * G)


def test_what_is_kept_holds_for_fewer_hosts_and_for_no_other_address(tmp_path: Path) -> None:
    fewer = reached("a", "b", home=Home(tmp_path))
    assert link_measurement.load(fewer) is None
    link_measurement.save(fewer, measured("a", "b", "c"))
    assert link_measurement.load(fewer) is not None
    assert fewer.rates == {"a": 9 * G, "b": 9 * G}
    moved = reached("a", "b", "c", home=Home(tmp_path))
    moved.addresses = {name: Address("10.9.9.9", "eth1", "") for name in "abc"}
    moved.rates = {"a": 1.0}
    assert link_measurement.load(moved) is None
    assert moved.rates == {}
    (tmp_path / "measured/links/lab.json").write_text("{")
    assert link_measurement.load(fewer) is None


def rebuilt(found: ReachedCluster, name: str, what: str) -> ReachedCluster:
    """Put another machine in the place of one, at the same name and address."""
    site = found.sites[name]
    new = {
        "installation": {"machine": "anew"},
        "processor": {"facts": msgspec.structs.replace(site.facts, cpu="EPYC 9654")},
        "card": {
            "facts": msgspec.structs.replace(
                site.facts, nics=tuple(msgspec.structs.replace(nic, driver="mlx5_core") for nic in site.facts.nics)
            )
        },
    }[what]
    found.sites[name] = msgspec.structs.replace(site, **new)
    return found


@pytest.mark.parametrize("what", ["installation", "processor", "card"])
def test_a_rebuilt_host_under_a_known_name_is_measured_anew(tmp_path: Path, what: str) -> None:
    rebooted, found = (reached("a", "b", "c", home=Home(tmp_path)) for _ in range(2))
    copies = {name: (Link("gpu0", "memory", "copy", 2e10, 1e-5, measured=True),) for name in "ab"}
    link_measurement.save(found, msgspec.structs.replace(measured("a", "b", "c"), inside=copies))
    costs = {"gloo": calibration.FittedCosts(Costs(), 3, 0.2, 0.1)}
    calibration.save(found, {"a": 1}, [MeasuredSum("native", 4_000, 1e-3)], costs, {})
    rebooted.sites["b"] = msgspec.structs.replace(
        rebooted.sites["b"], facts=msgspec.structs.replace(rebooted.sites["b"].facts, boot="another", time=9.0)
    )
    assert link_measurement.load(rebooted) is not None
    assert "gloo" in calibration.load(rebooted).for_ranks({"a": 1}).engines
    assert [each.bytes for each in calibration.sums_of(rebooted, {"a": 1})] == [4_000]
    assert calibration.sums_of(rebooted, {"a": 2}) == ()
    rebuilt(found, "b", what)
    assert link_measurement.load(found) is None
    assert calibration.load(found) == UNKNOWN_COSTS
    assert calibration.sums_of(found, {"a": 1}) == ()
    link_measurement.plan(found)
    assert "measure the links to 2 hosts" in actions(found)["b"]
    anew = msgspec.structs.replace(
        measured("a", "b", "c"), machines={name: site.identity for name, site in found.sites.items()}
    )
    assert link_measurement.inside_before(found, anew) == {"a": copies["a"]}


def test_a_host_that_was_not_measured_keeps_its_nominal_rate() -> None:
    edges = link_measurement.between(reached("a", "b", "c"), measured("a", "b"))
    assert {edge.a: (edge.bandwidth, edge.measured) for edge in edges} == {
        "a": (9 * G, True), "b": (9 * G, True), "c": (NOMINAL, False),
    }  # fmt: skip


RACKS = "[{address: a, labels: {rack: r1}}, {address: b, labels: {rack: r2}}, {address: c, labels: {rack: r2}}]"


def test_links_of_the_file_stand_above_what_was_measured() -> None:
    chosen = cluster("links: [{between: [r1, r2], bandwidth: 1 Gbit/s, latency: 50 us}]\n", RACKS)
    edges = link_measurement.between(reached("a", "b", "c", chosen=chosen), measured("a", "b", "c"))
    assert Between("r1", "r2", G, 5e-5) in edges
    assert {(edge.a, edge.b) for edge in edges} == {("a", "r1"), ("b", "r2"), ("c", "r2"), ("r1", "r2")}
    alone = link_measurement.between(reached("a", "b", chosen=chosen), None)
    assert Between("r1", "r2", G, 5e-5) in alone


def test_a_link_whose_end_is_not_there_now_is_left_out() -> None:
    chosen = cluster("links: [{between: [a, c], bandwidth: 1 Gbit/s}]\n")
    assert {edge.b for edge in link_measurement.between(reached("a", "b", chosen=chosen), None)} == {"network"}


def actions(found: ReachedCluster) -> dict[str, list[str]]:
    return {name: [str(action) for action in each] for name, each in found.plans.items()}


def test_up_measures_messages_of_several_hosts_that_are_ready_idle_and_unmeasured(tmp_path: Path) -> None:
    def planned(found: ReachedCluster) -> bool:
        calibration.plan(found)
        assert calibration.planned(found) == ("measure the cost of messages" in actions(found)["a"])
        return calibration.planned(found)

    def some(**changes: object) -> ReachedCluster:
        found = reached("a", "b", home=Home(tmp_path))
        found.sites = {
            name: msgspec.structs.replace(site, **{"modules": {"torch": "2.5"}, **changes})
            for name, site in found.sites.items()
        }
        return found

    assert planned(some())
    assert not planned(some(modules={}))
    assert not planned(some(jobs=[RunningJob("digits-1", "/w/jobs/digits-1", 1)]))
    assert not planned(reached("a", home=Home(tmp_path)))
    off = some()
    off.chosen = cluster("network: {measure_messages: false}\n")
    assert not planned(off)
    serving = some()
    serving.chosen = cluster("", "[{address: a}, {address: b, roles: [server]}]")
    assert not planned(serving)
    failed = some()
    failed.failed["b"] = HostUnreachable("b", where="b")
    assert not planned(failed)
    dropped = some()
    calibration.plan(dropped)
    dropped.failed["b"] = HostUnreachable("b", where="b")  # while it was made ready
    assert not calibration.planned(dropped)
    calibration.drop(dropped)
    assert actions(dropped) == {"a": [], "b": []}
    calibration.save(some(), {"a": 1}, [], {"psctl": calibration.FittedCosts(Costs(1e-4), 3, 0.2, 0.1)}, {})
    assert not planned(some())


def test_up_measures_what_is_not_kept_and_only_that(tmp_path: Path) -> None:
    found = reached("a", "b", "c", home=Home(tmp_path))
    link_measurement.plan(found)
    assert actions(found) == {name: ["measure the links to 2 hosts"] for name in "abc"}
    link_measurement.save(found, measured("a", "b", "c"))
    found = reached("a", "b", "c", home=Home(tmp_path))
    link_measurement.plan(found)
    assert actions(found) == {"a": [], "b": [], "c": []}


def test_up_also_finds_the_network_where_hosts_have_several(tmp_path: Path) -> None:
    found = reached("a", "b", home=Home(tmp_path), nics=2)
    link_measurement.plan(found)
    assert set(map(tuple, actions(found).values())) == {
        ("find the network by which the hosts reach each other", "measure the link to 1 host")
    }


def test_up_measures_nothing_of_one_host_nor_while_a_job_runs(tmp_path: Path) -> None:
    lone, busy = reached("a", home=Home(tmp_path)), reached("a", "b", home=Home(tmp_path))
    busy.sites["b"] = msgspec.structs.replace(busy.sites["b"], jobs=[RunningJob("mlp-1", "/w/jobs/mlp-1", 1)])
    for found in (lone, busy):
        link_measurement.plan(found)
        assert not any(found.plans.values())


def test_a_measurement_that_fails_is_a_warning_and_no_action(tmp_path: Path) -> None:
    shells = {HostName(name): FakeShell(name) for name in "ab"}
    found = reached("a", "b", home=Home(tmp_path), fleet=Fleet(dict(shells), {}))
    link_measurement.plan(found)
    for shell in shells.values():
        shell.on("python3", CommandResult(1, b"", b"no sockets here"))
    (warning,) = link_measurement.carry_out(found, lambda *_: None)
    assert warning.startswith("the links were not measured: nothing could be measured: a - b:")
    assert not any(isinstance(action, MeasureLinks) for each in found.plans.values() for action in each)
    assert link_measurement.load(found) is None


def test_wide_scatter_lost_pairs_and_odd_fabrics_are_reported() -> None:
    assert link_measurement.warnings(cluster(), measured("a", "b", spread=0.09)) == ()
    wide = link_measurement.warnings(cluster(), measured("a", "b", spread=0.25))
    assert [each.what for each in wide] == [
        "rates varied from repeat to repeat: a -> b by 25% around 9 Gbit/s, b -> a by 25% around 9 Gbit/s"
    ]
    many = link_measurement.warnings(cluster(), measured("a", "b", "c", spread=0.25))
    assert many[0].what.endswith("around 9 Gbit/s, 3 more")
    lost = msgspec.structs.replace(measured("a", "b"), missing=(("a", "c", "no route"),))
    assert [each.what for each in link_measurement.warnings(cluster(), lost)] == [
        "a - c could not be measured: no route"
    ]


class Answers:
    """A host whose there_link answers dials by a table of rates, and notes what it was asked."""

    def __init__(self, name: str, rates: dict[str, float]) -> None:
        self.shell, self.rates = FakeShell(name), rates
        self.asked: list[Any] = []
        self.shell.on("python3", self.answer)

    def answer(self, argv: Sequence[str], stdin: bytes) -> CommandResult:
        verb, question = argv[-2], json.loads(argv[-1])
        assert len(stdin.strip()) == 32, "the token travels on standard input"
        assert stdin.decode().strip() not in " ".join(argv)
        self.asked.append((verb, question))
        reply: Any = {}
        if verb == "ports":
            own = f"10.0.0.{'abc'.index(self.shell.name) + 1}"
            reply = {"ports": {own: 7000}, "failed": {}}
        if verb == "dial":
            rate = self.rates[question["to"][0]]
            reply = {"latency": 1e-4, "out": [rate] * question["repeats"], "in": [rate / 2] * question["repeats"]}
        return CommandResult(0, json.dumps(reply).encode(), b"")


def fleet_of(*hosts: Answers) -> Fleet:
    return Fleet({HostName(host.shell.name): host.shell for host in hosts}, {})


def test_every_pair_is_dialled_once_and_counted_both_ways() -> None:
    table = {f"10.0.0.{number}": number * G for number in (1, 2, 3)}
    hosts = [Answers(name, table) for name in "abc"]
    chosen = cluster("network: {ports: 29400-29499, congestion: reno}\n")
    asked_of = reached("a", "b", "c", chosen=chosen, fleet=fleet_of(*hosts))
    found = link_measurement.measure(asked_of, lambda *_: None, link_measurement.QUICK)
    rates = {(s.a, s.b): s.rate / G for one in found.series for s in one.samples}
    assert rates == {("a", "b"): 2, ("b", "a"): 1, ("a", "c"): 3, ("c", "a"): 1.5, ("b", "c"): 3, ("c", "b"): 1.5}
    assert found.addresses == {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    asked = [question for host in hosts for verb, question in host.asked if verb == "serve"]
    assert {(tuple(each["ports"]), each["congestion"]) for each in asked} == {((29400, 29499), "reno")}
    dials = [question for host in hosts for verb, question in host.asked if verb == "dial"]
    assert {each["streams"] for each in dials} == {1}
    assert {each["from"] for each in dials} == {"10.0.0.1", "10.0.0.2"}
    assert all(host.asked[-1][0] == "stop" for host in hosts)


def test_a_cluster_without_pairs_has_nothing_to_measure() -> None:
    host = Answers("a", {})
    assert link_measurement.measure(reached("a", fleet=fleet_of(host)), lambda *_: None).series == ()
    assert host.asked == []


def test_copies_are_measured_on_hosts_with_gpus_by_the_jobs_own_python() -> None:
    said: list[tuple[str, str]] = []
    row = {"a": "CPU1", "b": "GPU0", "bandwidth": 2e10, "latency": 1e-5, "spread": 0.31}
    shells = {HostName(name): FakeShell(name) for name in "ab"}
    shells[HostName("a")].on("/w/python", CommandResult(0, json.dumps({"copies": [row], "error": ""}).encode(), b""))
    shells[HostName("b")].on("/w/python", CommandResult(0, b'{"copies": [], "error": "its torch sees no GPU"}', b""))
    fleet = Fleet(dict(shells), {})
    found = link_measurement.inside(reached("a", "b", fleet=fleet, gpus=1), lambda *words: said.append(words))
    assert found == {"a": (Link("CPU1", "GPU0", "copy", 2e10, 1e-5, measured=True),)}
    assert said[1:] == [
        ("a", "copies CPU1 - GPU0 varied by 31%: a device is busy"),
        ("b", "no copies measured: its torch sees no GPU"),
    ]
    assert json.loads(shells[HostName("a")].calls[-1][-1])["nodes"] == [1]
    assert link_measurement.inside(reached("a", "b", fleet=fleet), lambda *_: None) == {}


class Meets(Answers):
    """A host that answers at some addresses only, and moves a rate on each."""

    def answer(self, argv: Sequence[str], stdin: bytes) -> CommandResult:
        verb, question = argv[-2], json.loads(argv[-1])
        if verb == "ports":
            number = "abc".index(self.shell.name) + 1
            ports = {f"10.0.{net}.{number}": 7000 for net in (0, 1)}
            return CommandResult(0, json.dumps({"ports": ports, "failed": {}}).encode(), b"")
        if verb == "reach":
            answers = {
                key: {"latency": 1e-4} if to[0] in self.rates else {"error": "no answer"}
                for key, to in question["to"].items()
            }
            self.asked.append((verb, question))
            return CommandResult(0, json.dumps(answers).encode(), b"")
        return super().answer(argv, stdin)


def probed(home: Home, rates: dict[str, float], **options: Any) -> tuple[ReachedCluster, list[Meets]]:
    hosts = [Meets(name, rates) for name in "ab"]
    found = reached("a", "b", home=home, fleet=fleet_of(*hosts), nics=2)
    reach.find(found, lambda *_: None, **options)
    return found, hosts


def test_the_network_is_probed_once_and_remembered_for_these_addresses(tmp_path: Path) -> None:
    home = Home(tmp_path)
    rates = {"10.0.0.1": 1e6, "10.0.0.2": 1e6, "10.0.1.1": G, "10.0.1.2": G}
    found, hosts = probed(home, rates)
    assert {name: (one.address, one.interface) for name, one in found.addresses.items()} == {
        "a": ("10.0.1.1", "eth1"), "b": ("10.0.1.2", "eth1"),
    }  # fmt: skip
    assert {verb for host in hosts for verb, _ in host.asked} >= {"reach", "dial"}
    again, quiet = probed(home, rates)
    assert again.addresses == found.addresses
    assert [host.asked for host in quiet] == [[], []]
    machine = machines_of(again)["a"]
    assert (machine.address, machine.interface) == ("10.0.1.1", "eth1")
    assert machine.reason.startswith("all hosts reach each other on it, and it moves")
    assert not reach.settled(rebuilt(reached("a", "b", home=home, nics=2), "a", "installation"))
    moved = reached("b", "a", home=home, nics=2)
    assert not reach.settled(moved)
    assert moved.addresses == {}


def test_doctor_saves_nothing_nor_does_a_probe_without_answers(tmp_path: Path) -> None:
    home = Home(tmp_path)
    probed(home, {"10.0.0.1": G, "10.0.0.2": G}, keep=False)
    found, _ = probed(home, {})
    assert found.addresses["a"] == Address("10.0.0.1", "eth0", "psctl reaches it on this interface")
    assert not (tmp_path / "measured").exists()


def test_one_address_a_host_is_not_probed(tmp_path: Path) -> None:
    hosts = [Meets(name, {}) for name in "ab"]
    found = reached("a", "b", home=Home(tmp_path), fleet=fleet_of(*hosts))
    reach.find(found, lambda *_: None)
    assert [host.asked for host in hosts] == [[], []]
    assert reach.addresses(found)["a"].address == "10.0.0.1"


def test_no_pair_that_answers_is_an_error_that_names_one() -> None:
    host = Answers("a", {"10.0.0.2": G})
    other = Answers("b", {})
    host.shell.on("python3", lambda argv, stdin: CommandResult(1, b"", b"refused"))
    with pytest.raises(HostUnreachable, match="nothing could be measured: a - b"):
        link_measurement.measure(reached("a", "b", fleet=fleet_of(host, other)), lambda *_: None)
