"""Which network hosts meet on: none that is dead, the faster of two, and what the file says above all."""

from __future__ import annotations

import pytest

from psctl.topology.facts import HostFacts, Nic
from psctl.topology.network.addresses import AddressCandidate, ChosenAddress, HostReach, candidates, rdma_of
from psctl.topology.network.common_network import CommonNetwork, choose_common_network, networks, networks_to_measure
from psctl.topology.readings import RdmaPort, RdmaPorts, Reading
from psctl.types import HostName

G = 125e6
NAMES = [HostName(name) for name in ("a", "b", "c")]


def facts(number: int, *nics: Nic, readings: tuple[Reading, ...] = ()) -> HostFacts:
    lo = Nic("lo", ("127.0.0.1/8",), kind="loopback")
    docker = Nic("docker0", ("172.17.0.1/16",), kind="bridge")
    return HostFacts(
        machine="x86_64", cores=2, cpu="", numa=(), memory=1,
        nics=(lo, docker, *nics), gpus=(), findings=(), time=None, default_interface="eth0",
        connected=f"10.0.0.{number}", boot=f"boot-{number}", readings=readings,
    )  # fmt: skip


def hosts(speed: float | None = None, fast: float | None = None, names: tuple[str, str] = ("eth0", "ens1")) -> dict[
    HostName, HostReach
]:  # fmt: skip
    """Hosts that psctl reaches at eth0, with a second interface in another subnet."""
    return {
        name: HostReach(
            facts(
                number, Nic(names[0], (f"10.0.0.{number}/24",), speed=speed),
                Nic(names[1], (f"192.168.0.{number}/24", f"fd00::{number}/64"), speed=fast),
            )
        )
        for number, name in enumerate(NAMES, 1)
    }  # fmt: skip


def all_hear(
    asked: dict[HostName, tuple[AddressCandidate, ...]], but: str = ""
) -> dict[tuple[HostName, HostName, str], float]:
    """Everyone answers everyone, except at one address."""
    return {
        (a, b, each.address): 1e-4 if each.address.startswith("10.") else 5e-5
        for a in asked for b, own in asked.items() if a != b for each in own if each.address != but
    }  # fmt: skip


def decide(
    asked: dict[HostName, tuple[AddressCandidate, ...]], *rates: float, but: str = ""
) -> dict[HostName, ChosenAddress]:
    heard = all_hear(asked, but)
    found = networks(asked, heard)
    assert len(networks_to_measure(found)) == len(rates)
    return choose_common_network(asked, heard, found, rates)


def test_a_host_with_one_address_needs_no_probe() -> None:
    single = {
        name: HostReach(facts(n, Nic("eth0", (f"10.0.0.{n}/24", f"fd00::{n}/64")))) for n, name in enumerate(NAMES)
    }
    assert candidates(single) == {}


def test_addresses_of_the_file_need_no_probe() -> None:
    assert candidates(hosts(), "ens1") == {}
    told = {name: HostReach(host.facts, f"192.168.0.{n}") for n, (name, host) in enumerate(hosts().items(), 1)}
    assert candidates(told) == {}


def test_one_machine_and_one_host_need_no_probe() -> None:
    assert candidates({NAMES[0]: hosts()[NAMES[0]]}) == {}
    same = hosts()[NAMES[0]]
    assert candidates(dict.fromkeys(NAMES, same)) == {}


def test_candidates_are_one_an_interface_and_no_bridge_or_loopback() -> None:
    found = candidates(hosts(G, 10 * G))[NAMES[0]]
    assert found == (
        AddressCandidate("10.0.0.1", "eth0", "10.0.0.0/24", G, ssh=True),
        AddressCandidate("192.168.0.1", "ens1", "192.168.0.0/24", 10 * G),
    )


def test_interfaces_into_containers_are_no_candidates() -> None:
    for inner in ("flannel.1", "cali12ab", "veth0a1b", "kube-ipvs0", "weave"):
        assert candidates(hosts(names=("eth0", inner))) == {}


def test_a_host_reached_by_an_address_that_is_not_its_own_cannot_be_probed() -> None:
    asked = hosts() | {NAMES[0]: HostReach(facts(9, Nic("eth0", ("10.0.0.1/24",)), Nic("ens1", ("192.168.0.1/24",))))}
    assert candidates(asked) == {}


def test_the_nominally_faster_network_is_taken_without_a_burst() -> None:
    chosen = decide(candidates(hosts(G, 10 * G)))
    assert {(one.interface, one.address) for one in chosen.values()} == {("ens1", f"192.168.0.{n}") for n in (1, 2, 3)}
    assert chosen[NAMES[0]].reason == "all hosts reach each other on it, and it has 10 Gbit/s; eth0 1 Gbit/s"


@pytest.mark.parametrize(("speed", "fast"), [(None, None), (10 * G, 10 * G), (None, 10 * G), (10 * G, 12 * G)])
def test_where_nominal_speeds_do_not_decide_a_burst_does(speed: float | None, fast: float | None) -> None:
    asked = candidates(hosts(speed, fast))
    chosen = decide(asked, 1.2e6, 50e6)
    assert {one.interface for one in chosen.values()} == {"ens1"}
    assert chosen[NAMES[0]].reason == "all hosts reach each other on it, and it moves 400 Mbit/s; eth0 9.6 Mbit/s"
    assert {one.interface for one in decide(asked, 50e6, 1.2e6).values()} == {"eth0"}


def test_of_equals_the_one_that_psctl_came_over() -> None:
    assert {one.interface for one in decide(candidates(hosts()), 50e6, 55e6).values()} == {"eth0"}


def test_a_network_that_one_host_cannot_use_is_left_out() -> None:
    chosen = decide(candidates(hosts(G, 10 * G)), but="192.168.0.2")
    assert {one.interface for one in chosen.values()} == {"eth0"}
    assert chosen[NAMES[0]].reason == "it is the only network on which all hosts reach each other"


def test_interfaces_of_one_name_are_a_network_where_each_host_has_a_subnet_of_its_own() -> None:
    routed = {
        name: HostReach(facts(n, Nic("eth0", (f"10.0.0.{n}/24",)), Nic("ens1", (f"192.168.{n}.1/31",), speed=9e9)))
        for n, name in enumerate(NAMES, 1)
    }
    asked = candidates(routed)
    found = networks(asked, all_hear(asked))
    assert [(each.name, each.ssh) for each in found] == [("eth0", True), ("ens1", False)]


def test_where_no_network_joins_all_each_host_is_taken_where_most_reach_it() -> None:
    asked = candidates(hosts(G, 10 * G))
    heard = {way: late for way, late in all_hear(asked, but="10.0.0.2").items() if way[2] != "192.168.0.3"}
    assert networks(asked, heard) == []
    chosen = choose_common_network(asked, heard, [], [])
    assert [chosen[name].address for name in NAMES] == ["192.168.0.1", "192.168.0.2", "10.0.0.3"]
    assert chosen[NAMES[0]].reason == "2 other hosts reach it here"
    assert choose_common_network(asked, {}, [], []) == {}


def test_a_network_is_as_fast_as_its_slowest_interface() -> None:
    fast, slow = AddressCandidate("10.0.0.1", "e", "n", 2.0), AddressCandidate("10.0.0.2", "e", "n", 1.0)
    assert CommonNetwork("e", {NAMES[0]: fast, NAMES[1]: slow}, 0.0).speed == 1.0
    unknown = AddressCandidate("10.0.0.2", "e", "n", None)
    assert CommonNetwork("e", {NAMES[0]: fast, NAMES[1]: unknown}, 0.0).speed is None


def rdma(*ports: RdmaPort) -> HostFacts:
    return facts(1, Nic("eth0", ("10.0.0.1/24",)), readings=(RdmaPorts(ports),))


def test_active_infiniband_ports_are_given_to_nccl() -> None:
    host = rdma(
        RdmaPort("mlx5_0", 1, 25e9, active=True, layer="InfiniBand", interface="ib0"),
        RdmaPort("mlx5_1", 1, 25e9, active=False, layer="InfiniBand"),
        RdmaPort("mlx5_2", 1, 25e9, active=True, layer="InfiniBand"),
        RdmaPort("mlx5_3", 1, 3e9, active=True, layer="Ethernet", interface="eno1"),
    )
    assert rdma_of(host, "eth0") == "=mlx5_0:1,mlx5_2:1"
    assert rdma_of(host, "ib0") == "=mlx5_0:1,mlx5_2:1"


def test_on_ethernet_the_rails_of_the_chosen_interface_are() -> None:
    host = rdma(
        RdmaPort("mlx5_0", 1, 25e9, active=True, layer="Ethernet", interface="ens1"),
        RdmaPort("mlx5_1", 1, 25e9, active=True, layer="Ethernet", interface="ens2"),
        RdmaPort("mlx5_2", 1, 3e9, active=True, layer="Ethernet", interface="eno1"),
    )
    assert rdma_of(host, "ens1") == "=mlx5_0:1,mlx5_1:1"
    assert rdma_of(host, "eth0") == ""
    assert rdma_of(facts(1), "eth0") == ""
