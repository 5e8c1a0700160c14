"""Seats of workers, and hosts for servers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.graph import ClusterGraph, Device, HostGraph, HostNode, Link
from psctl.topology.placing import Holder, holders, seats
from tests.topology.fabrics import behind_switch, dgx1v, nvswitch

WORDS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def by_words(words: list[list[str]]) -> HostGraph:
    """A row a GPU: its words with NIC0, NIC1 ..."""
    nics = [Device(f"NIC{at}", "nic", name=f"mlx5_{at}") for at in range(len(words[0]))]
    gpus = [Device(f"GPU{at}", "gpu", at % 2) for at in range(len(words))]
    links = [Link(f"GPU{at}", f"NIC{n}", word) for at, row in enumerate(words) for n, word in enumerate(row)]
    return HostGraph((*gpus, *nics), tuple(links))


def own(graph: HostGraph) -> list[str]:
    return [seat.nic for seat in seats(graph)]


def test_each_pair_of_the_hybrid_cube_mesh_has_the_nic_on_its_switch() -> None:
    assert own(dgx1v()) == [f"mlx5_{at // 2}" for at in range(8)]
    assert [seat.numa for seat in seats(dgx1v())] == [0] * 4 + [1] * 4
    assert [(seat.rank, seat.gpu) for seat in seats(dgx1v())] == [(at, f"GPU{at}") for at in range(8)]


def test_the_nearest_word_counts() -> None:
    graph = by_words([["SYS", "NODE", "PXB"], ["PIX", "PHB", "SYS"], ["NODE", "PHB", "SOC"]])
    assert own(graph) == ["NIC2", "NIC0", "NIC1"]


def test_equally_near_nics_are_spread() -> None:
    assert own(by_words([["SYS", "SYS"]] * 4)) == ["NIC0", "NIC1", "NIC0", "NIC1"]


def test_a_gpu_makes_room_for_one_that_has_no_choice() -> None:
    assert own(by_words([["PIX", "PIX"], ["PIX", "SYS"]])) == ["NIC1", "NIC0"]


def test_the_wider_of_two_equally_near_nics_comes_first() -> None:
    devices = (Device("CPU0", "cpu", 0), Device("GPU0", "gpu"), Device("slow", "nic"), Device("fast", "nic"))
    links = (Link("GPU0", "CPU0", "PCIe", 16e9), Link("slow", "CPU0", "PCIe", 2e9), Link("fast", "CPU0", "PCIe", 16e9))
    assert own(HostGraph(devices, links)) == ["fast"]
    assert seats(HostGraph(devices, links))[0].numa == 0


def test_without_a_matrix_the_switches_on_the_way_tell() -> None:
    devices = [Device("CPU0", "cpu", 0), Device("SW0", "switch"), Device("GPU0", "gpu"), Device("far", "nic")]
    devices += [Device("near", "nic")]
    links = [Link("GPU0", "SW0", "PCIe", 16e9), Link("SW0", "CPU0", "PCIe", 16e9), Link("far", "CPU0", "PCIe", 32e9)]
    assert own(HostGraph(tuple(devices), (*links, Link("near", "SW0", "PCIe", 8e9)))) == ["near"]


def test_a_dead_port_is_nobodys() -> None:
    graph = by_words([["PIX", "SYS"]])
    dead = tuple(Device(one.id, one.kind, bandwidth=0.0) if one.id == "NIC0" else one for one in graph.devices)
    assert own(HostGraph(dead, graph.links)) == ["NIC1"]


def test_without_gpus_there_is_one_seat_at_the_fastest_nic() -> None:
    devices = (Device("CPU0", "cpu", 0), Device("eth0", "nic", bandwidth=1e9), Device("eth1", "nic", 0, bandwidth=5e9))
    assert [(seat.gpu, seat.nic, seat.numa) for seat in seats(HostGraph(devices))] == [("", "eth1", 0)]
    assert own(behind_switch(2)) == ["", ""]


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from(WORDS), min_size=n, max_size=n), min_size=1, max_size=6)
    )
)
def test_no_gpu_could_move_to_an_emptier_nic_that_is_as_near(words: list[list[str]]) -> None:
    graph = by_words(words)
    found = own(graph)
    for at, row in enumerate(words):
        nearest = min(row, key=WORDS.index)
        choices = [f"NIC{n}" for n, word in enumerate(row) if word == nearest]
        assert found[at] in choices
        assert all(found.count(other) >= found.count(found[at]) - 1 for other in choices)


def cluster(gpu_hosts: int, cpu_hosts: int) -> ClusterGraph:
    hosts = [HostNode(f"g{at}", nvswitch(2)) for at in range(gpu_hosts)]
    return ClusterGraph((*hosts, *(HostNode(f"c{at}", HostGraph()) for at in range(cpu_hosts))))


@pytest.mark.parametrize(("spare", "time"), [(0, 1.75), (1, 1.6), (2, 1.4737), (4, 1.2727), (8, 1.0), (11, 1.0)])
def test_byteps_split_of_eight_gpu_hosts(spare: int, time: float) -> None:
    """FORMULAS 2.5: t in M/B; every machine that takes part is busy for exactly t."""
    found = holders(cluster(8, spare))
    shares = {one.host: one.share for one in found}
    assert sum(shares.values()) == 1
    on_gpu, on_cpu = shares.get("g0", Fraction()), shares.get("c0", Fraction())
    busy = (1 - on_gpu) + 7 * on_gpu  # its own pushes, and the replies to the others
    assert float(busy) == pytest.approx(time, abs=5e-5)
    assert spare == 0 or 8 * on_cpu == busy
    assert [one.host for one in found][: min(spare, 8)] == [f"c{at}" for at in range(min(spare, 8))]


def test_hosts_alone_share_evenly_and_a_single_one_has_all() -> None:
    assert holders(cluster(0, 4)) == tuple(Holder(f"c{at}", Fraction(1, 4)) for at in range(4))
    assert holders(cluster(1, 0)) == (Holder("g0", Fraction(1)),)
    assert holders(cluster(1, 2)) == (Holder("c0", Fraction(1)),)
    assert holders(ClusterGraph((HostNode("a", HostGraph(), roles=("server",)),))) == ()


def test_roles_are_kept() -> None:
    hosts = [HostNode(f"w{at}", HostGraph(), roles=("worker",)) for at in range(4)]
    hosts += [HostNode(f"s{at}", HostGraph(), roles=("server",)) for at in range(2)]
    assert holders(ClusterGraph(tuple(hosts))) == (Holder("s0", Fraction(1, 2)), Holder("s1", Fraction(1, 2)))


def test_heads_follow_the_parts() -> None:
    found = holders(cluster(4, 2), 6)  # D = 20: 6/20 on each of two, 2/20 on each of four
    assert [(one.host, one.count) for one in found] == [
        ("c0", 1),
        ("c1", 1),
        ("g0", 1),
        ("g1", 1),
        ("g2", 1),
        ("g3", 1),
    ]
    assert [one.count for one in holders(cluster(4, 2), 10)] == [3, 3, 1, 1, 1, 1]
    few = holders(cluster(4, 2), 2)
    assert [(one.host, one.share) for one in few] == [("c0", Fraction(1, 2)), ("c1", Fraction(1, 2))]
