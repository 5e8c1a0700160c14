"""Seats of workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.graph import Device, HostGraph, Link
from psctl.topology.host.worker_placement import place_workers
from tests.topology.fabrics import behind_switch, dgx1v

WORDS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def by_words(words: list[list[str]]) -> HostGraph:
    """A row a GPU: its words with NIC0, NIC1 ..."""
    nics = [Device(f"NIC{at}", "nic", name=f"mlx5_{at}") for at in range(len(words[0]))]
    gpus = [Device(f"GPU{at}", "gpu", at % 2) for at in range(len(words))]
    links = [Link(f"GPU{at}", f"NIC{n}", word) for at, row in enumerate(words) for n, word in enumerate(row)]
    return HostGraph((*gpus, *nics), tuple(links))


def own(graph: HostGraph) -> list[str]:
    return [seat.nic for seat in place_workers(graph)]


def test_each_pair_of_the_hybrid_cube_mesh_has_the_nic_on_its_switch() -> None:
    assert own(dgx1v()) == [f"mlx5_{at // 2}" for at in range(8)]
    assert [seat.numa for seat in place_workers(dgx1v())] == [0] * 4 + [1] * 4
    assert [(seat.rank, seat.gpu) for seat in place_workers(dgx1v())] == [(at, f"GPU{at}") for at in range(8)]


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
    assert place_workers(HostGraph(devices, links))[0].numa == 0


def test_without_a_matrix_the_switches_on_the_path_decide() -> None:
    devices = [Device("CPU0", "cpu", 0), Device("SW0", "switch"), Device("GPU0", "gpu"), Device("far", "nic")]
    devices += [Device("near", "nic")]
    links = [Link("GPU0", "SW0", "PCIe", 16e9), Link("SW0", "CPU0", "PCIe", 16e9), Link("far", "CPU0", "PCIe", 32e9)]
    assert own(HostGraph(tuple(devices), (*links, Link("near", "SW0", "PCIe", 8e9)))) == ["near"]


def test_a_port_that_is_down_is_placed_with_no_worker() -> None:
    graph = by_words([["PIX", "SYS"]])
    dead = tuple(Device(one.id, one.kind, bandwidth=0.0) if one.id == "NIC0" else one for one in graph.devices)
    assert own(HostGraph(dead, graph.links)) == ["NIC1"]


def test_without_gpus_there_is_one_seat_at_the_fastest_nic() -> None:
    devices = (Device("CPU0", "cpu", 0), Device("eth0", "nic", bandwidth=1e9), Device("eth1", "nic", 0, bandwidth=5e9))
    assert [(seat.gpu, seat.nic, seat.numa) for seat in place_workers(HostGraph(devices))] == [("", "eth1", 0)]
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
