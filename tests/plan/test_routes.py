"""Ways are wide and short, share what they cross, and leave a host by the nearest nic."""

from __future__ import annotations

import pytest

from psctl.plan.simulation.cost_model import ALPHA, LOOPBACK_RATE
from psctl.plan.simulation.routes import Delays, SimulatedNetwork, places
from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Link
from tests.reference.networks import NO_DELAYS, star


def box(gpus: int = 4, rate: float = 16e9) -> HostGraph:
    """GPUs behind one PCIe switch with one uplink."""
    names = [f"GPU{index}" for index in range(gpus)]
    devices = (*(Device(name, "gpu") for name in names), Device("SW0", "switch"), Device("CPU0", "cpu"))
    links = (*(Link(name, "SW0", "PCIe", rate) for name in names), Link("SW0", "CPU0", "PCIe", rate))
    return HostGraph(devices, links)


def railed() -> HostGraph:
    """Four GPUs and four nics behind two PCIe switches, the GPUs joined pairwise by NVLink."""
    gpus, nics = [f"GPU{index}" for index in range(4)], [f"NIC{index}" for index in range(4)]
    switch = {name: f"SW{index // 2}" for names in (gpus, nics) for index, name in enumerate(names)}
    devices = (
        *(Device(name, "gpu") for name in gpus), *(Device(name, "nic", bandwidth=12e9) for name in nics),
        Device("SW0", "switch"), Device("SW1", "switch"), Device("CPU0", "cpu"),
    )  # fmt: skip
    links = (
        *(Link(name, switch[name], "PCIe", 16e9) for name in (*gpus, *nics)),
        Link("SW0", "CPU0", "PCIe", 16e9), Link("SW1", "CPU0", "PCIe", 16e9),
        Link("GPU0", "GPU2", "NV2", 50e9, switched=False), Link("GPU1", "GPU3", "NV2", 50e9, switched=False),
    )  # fmt: skip
    return HostGraph(devices, links)


def named(network: SimulatedNetwork, a: str, b: str) -> list[str]:
    return [network.names[link] for link in network.route(a, b).links]


def test_gpus_of_one_switch_are_joined_there_and_the_cpu_is_one_edge_further() -> None:
    network = SimulatedNetwork(ClusterGraph((HostNode("a", box()),)))
    assert named(network, "a/GPU0", "a/GPU3") == ["GPU0 -> SW0", "SW0 -> GPU3"]
    assert named(network, "a/GPU1", "a") == ["GPU1 -> SW0", "SW0 -> CPU0"]
    assert named(network, "a", "a/GPU1") == ["CPU0 -> SW0", "SW0 -> GPU1"]


def test_the_two_directions_of_an_edge_are_two_capacities() -> None:
    network = SimulatedNetwork(ClusterGraph((HostNode("a", box()),)))
    there, back = network.route("a/GPU0", "a/GPU1").links, network.route("a/GPU1", "a/GPU0").links
    assert not set(there) & set(back)


def test_a_gpu_passes_nothing_on_for_others() -> None:
    network = SimulatedNetwork(ClusterGraph((HostNode("a", railed()),)))
    assert named(network, "a/GPU0", "a/GPU2") == ["GPU0 -> GPU2"]
    # By NVLink it would be GPU0 - GPU2 - SW1 - GPU3: no shorter for being faster at first.
    assert named(network, "a/GPU0", "a/GPU3") == [
        "GPU0 -> SW0", "SW0 -> CPU0", "CPU0 -> SW1", "SW1 -> GPU3",
    ]  # fmt: skip


def test_of_two_ways_the_widest_is_taken() -> None:
    devices = (Device("GPU0", "gpu"), Device("GPU1", "gpu"), Device("SW0", "switch"), Device("NVSW0", "switch"))
    links = tuple(
        Link(gpu, switch, kind, rate)
        for gpu in ("GPU0", "GPU1")
        for switch, kind, rate in (("SW0", "PCIe", 16e9), ("NVSW0", "NVLink", 300e9))
    )
    network = SimulatedNetwork(ClusterGraph((HostNode("a", HostGraph(devices, links)),)))
    assert named(network, "a/GPU0", "a/GPU1") == ["GPU0 -> NVSW0", "NVSW0 -> GPU1"]


def test_each_gpu_leaves_by_the_nearest_nic_and_those_of_one_switch_by_different_ones() -> None:
    hosts = tuple(HostNode(name, railed()) for name in ("a", "b"))
    cables = tuple(Between(host.name, "network", 12e9, via=f"NIC{nic}") for host in hosts for nic in range(4))
    network = SimulatedNetwork(ClusterGraph(hosts, cables))
    for rank in range(4):
        switch = f"SW{rank // 2}"
        assert named(network, f"a/GPU{rank}", f"b/GPU{rank}") == [
            f"a/GPU{rank} -> a/{switch}", f"a/{switch} -> a/NIC{rank}", f"a/NIC{rank} -> network",
            f"network -> b/NIC{rank}", f"b/NIC{rank} -> b/{switch}", f"b/{switch} -> b/GPU{rank}",
        ]  # fmt: skip


def test_racks_share_the_trunk_between_their_switches() -> None:
    hosts = tuple(HostNode(name, HostGraph()) for name in "abcd")
    cables = (
        Between("a", "r1", 60e6), Between("b", "r1", 60e6), Between("c", "r2", 60e6), Between("d", "r2", 60e6),
        Between("r1", "r2", 24e6),
    )  # fmt: skip
    network = SimulatedNetwork(ClusterGraph(hosts, cables))
    assert named(network, "a", "b") == ["a -> r1", "r1 -> b"]
    assert named(network, "a", "d") == ["a -> r1", "r1 -> r2", "r2 -> d"]


def test_hosts_measured_in_pairs_have_one_port_each_and_pass_nothing_on() -> None:
    hosts = tuple(HostNode(name, HostGraph()) for name in "abc")
    network = SimulatedNetwork(ClusterGraph(hosts, (Between("a", "b", 60e6), Between("b", "c", 50e6))))
    assert named(network, "a", "b") == ["a -> b", "b port in"]
    assert network.capacities[network.names.index("b port in")] == 60e6
    with pytest.raises(KeyError, match="no link joins 'a' to 'c'"):
        network.route("a", "c")


def test_a_nic_slower_than_its_cable_is_the_port_unless_the_cable_was_measured() -> None:
    graph = HostGraph((Device("eth0", "nic", bandwidth=1e8),))
    for measured, expected in ((False, ["a/eth0 port out", "a/eth0 -> network"]), (True, ["a/eth0 -> network"])):
        hosts = (HostNode("a", graph), HostNode("b", HostGraph()))
        cables = (Between("a", "network", 2e8, via="eth0", measured=measured), Between("b", "network", 1e9))
        assert named(SimulatedNetwork(ClusterGraph(hosts, cables)), "a", "b")[:-1] == expected


def test_processes_of_one_host_exchange_data_in_its_memory() -> None:
    network = SimulatedNetwork(star_of_two := star(2, 1e9))
    route = network.route("node0", "node0")
    assert [network.names[link] for link in route.links] == ["node0 loopback"]
    assert network.capacities[route.links[0]] == LOOPBACK_RATE
    assert places(star_of_two) == ("node0", "node1")


def test_latency_is_that_of_the_links_else_the_usual_one() -> None:
    assert SimulatedNetwork(star(2, 1e9, latency=3e-5)).route("node0", "node1").latency == pytest.approx(3e-5)
    assert SimulatedNetwork(star(2, 1e9)).route("node0", "node1").latency == ALPHA
    assert SimulatedNetwork(star(2, 1e9), NO_DELAYS).route("node0", "node1").latency == 0.0
    inside = SimulatedNetwork(ClusterGraph((HostNode("a", box()),)), Delays(inside=7e-6))
    assert inside.route("a/GPU0", "a/GPU1").latency == 7e-6


def test_a_star_of_equal_hosts_is_uniform_and_any_other_is_not() -> None:
    equal = star(4, 1e9)
    names = [f"node{index}" for index in range(4)]
    assert SimulatedNetwork(equal).uniform(names) == SimulatedNetwork(equal).route("node0", "node1")
    assert SimulatedNetwork(equal).uniform([*names[:3], "node0"]) is None, "two ranks on one host share its port"
    slower = ClusterGraph(equal.hosts, (Between("node0", "network", 2e8), *equal.between[1:]))
    assert SimulatedNetwork(slower).uniform(names) is None
    assert SimulatedNetwork(ClusterGraph((HostNode("a", box()),))).uniform(["a/GPU0", "a/GPU1"]) is None


def test_ranks_are_the_gpus_or_the_hosts_without_any() -> None:
    cluster = ClusterGraph((HostNode("a", box(2)), HostNode("b", HostGraph())))
    assert places(cluster) == ("a/GPU0", "a/GPU1", "b")


def test_an_unknown_place_is_named() -> None:
    with pytest.raises(KeyError, match="GPU9"):
        SimulatedNetwork(ClusterGraph((HostNode("a", box()),))).route("a/GPU9", "a/GPU0")
