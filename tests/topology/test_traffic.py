"""Roads of bytes, and the closed forms of what crosses the cables."""

from __future__ import annotations

import math

import pytest

from psctl.topology import traffic
from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Link
from psctl.topology.roads import Roads
from tests.topology.fabrics import behind_switch, dgx1v, named, nvswitch

N = 100e6


def alone(graph: HostGraph) -> Roads:
    return Roads(ClusterGraph((HostNode("box", graph),)))


def star(count: int, latency: float = 0.0) -> tuple[Roads, tuple[str, ...]]:
    """Hosts on one network of 1 GB/s."""
    hosts = tuple(HostNode(f"h{at}", HostGraph()) for at in range(count))
    cables = tuple(Between(host.name, "network", 1e9, latency / 2) for host in hosts)
    return Roads(ClusterGraph(hosts, cables)), tuple(host.name for host in hosts)


def out(phases: tuple[traffic.Phase, ...], rank: str) -> float:
    return math.fsum(size for phase in phases for a, _, size in phase.moves if a == rank)


def test_direct_cables_are_taken_though_slots_be_wider() -> None:
    graph = behind_switch(2, 64e9)
    direct = Link("GPU0", "GPU1", "NV1", 25e9, switched=False)
    assert alone(HostGraph(graph.devices, (*graph.links, direct))).road("GPU0", "GPU1") == (("box", "GPU0", "GPU1"),)
    assert alone(graph).road("GPU1", "GPU0") == (("box", "GPU1", "SW0"), ("box", "SW0", "GPU0"))


def test_gpus_without_a_cable_meet_by_switches_and_processors() -> None:
    way = [arc[1] for arc in alone(dgx1v()).road("GPU0", "GPU7")]
    assert way == ["GPU0", "SW0", "CPU0", "CPU1", "SW3"]
    assert [arc[1] for arc in alone(nvswitch(3)).road("GPU0", "GPU2")] == ["GPU0", "NVSW0"]


def test_between_hosts_bytes_leave_and_enter_by_the_own_nics() -> None:
    hosts = tuple(HostNode(f"h{at}", dgx1v()) for at in range(2))
    cables = [Between(host.name, "network", 12e9, 2e-6, via=f"mlx5_{nic}") for host in hosts for nic in range(4)]
    roads = Roads(ClusterGraph(hosts, tuple(cables)))
    way = roads.road("h0/GPU7", "h1/GPU2")
    assert way[:2] == (("h0", "GPU7", "SW3"), ("h0", "SW3", "mlx5_3"))
    assert way[-2:] == (("h1", "mlx5_1", "SW1"), ("h1", "SW1", "GPU2"))
    assert all(host == "" for host, *_ in way[2:-2]) and len(way) > 4


def test_a_nic_without_a_cable_gives_way_to_one_that_has() -> None:
    hosts = tuple(HostNode(f"h{at}", dgx1v()) for at in range(2))
    roads = Roads(ClusterGraph(hosts, tuple(Between(host.name, "network", 1e9, via="mlx5_0") for host in hosts)))
    way = roads.road("h0/GPU7", "h1/GPU7")
    assert ("h0", "SW0", "mlx5_0") in way and ("h1", "mlx5_0", "SW0") in way


def test_there_is_no_way_to_hosts_that_nothing_joins() -> None:
    hosts = tuple(HostNode(name, HostGraph()) for name in "abc")
    roads = Roads(ClusterGraph(hosts, (Between("a", "b", 1e9),)))
    assert roads.road("a", "c") == () and roads.road("a", "b") != ()
    assert traffic.seconds(traffic.ring("abc", N), roads) == math.inf


def test_hosts_do_not_pass_on_what_is_for_others() -> None:
    hosts = tuple(HostNode(name, HostGraph()) for name in "abc")
    roads = Roads(ClusterGraph(hosts, (Between("a", "b", 1e9), Between("b", "c", 1e9))))
    assert roads.road("a", "c") == ()


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_bytes_of_each_way(count: int) -> None:
    """Out of each rank: 2(p-1)/p N is the least; FORMULAS 2.2."""
    roads, ranks = star(count, 1e-3)
    least = 2 * (count - 1) / count * N
    for phases, steps in ((traffic.ring(ranks, N), 2 * (count - 1)), (traffic.sharded(ranks, N), 2)):
        assert all(out(phases, rank) == pytest.approx(least) for rank in ranks)
        assert traffic.seconds(phases, roads) == pytest.approx(least / 1e9 + steps * 1e-3)
    if count & (count - 1) == 0:
        phases = traffic.halving_doubling(ranks, N)
        assert all(out(phases, rank) == pytest.approx(least) for rank in ranks)
        assert len(phases) == 2 * math.log2(count)
        assert all(out(traffic.recursive_doubling(ranks, N), rank) == math.log2(count) * N for rank in ranks)
    assert all(out(traffic.one_shot(ranks, N), rank) == pytest.approx((count - 1) * N) for rank in ranks)
    gather = traffic.root(ranks, N, ranks[0])
    assert traffic.seconds(gather, roads) == pytest.approx(2 * (count - 1) * (1e-3 + N / 1e9))


def test_ranks_beyond_a_power_of_two_join_another_first() -> None:
    roads, ranks = star(6, 1e-3)
    phases = traffic.halving_doubling(ranks, N)
    assert len(phases) == 2 * 2 + 2
    assert traffic.seconds(phases, roads) == pytest.approx((2 + 2 * 3 / 4) * 0.1 + 6e-3)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16])
def test_two_trees_send_no_more_than_twice_the_bytes_a_rank(count: int) -> None:
    _, ranks = star(count)
    phases = traffic.double_tree(ranks, N)
    assert all(out(phases, rank) <= 2.5 * N for rank in ranks)
    assert math.fsum(out(phases, rank) for rank in ranks) == pytest.approx(2 * (count - 1) * N)
    half = [(a, b) for a, b, _ in phases[0].moves[: 2 * (count - 1)]]
    reached = {ranks[0]}
    while more := {b for a, b in half if a in reached} - reached:
        reached |= more
    assert reached == set(ranks)


def test_a_pipeline_takes_the_best_number_of_pieces() -> None:
    """s steps of latency a in k pieces: (s + k)(a + B/k) is least at k = sqrt(s B / a)."""
    roads, ranks = star(2, 1e-3)
    phase = traffic.Phase((("h0", "h1", N),), 8, pipelined=True)
    best = min((8 + pieces) * (1e-3 + 0.1 / pieces) for pieces in range(1, 200))
    assert traffic.seconds((phase,), roads) == pytest.approx(best, rel=1e-3)
    assert traffic.seconds((phase,), roads) == pytest.approx((math.sqrt(8e-3) + math.sqrt(0.1)) ** 2)
    assert ranks == ("h0", "h1")


def test_loads_add_up_on_a_shared_slot() -> None:
    roads = alone(behind_switch(4))
    load = traffic.loads(traffic.root(named(4), N, "CPU0"), roads)
    assert load["box", "SW0", "CPU0"] == load["box", "CPU0", "SW0"] == 4 * N and load["box", "GPU2", "SW0"] == N
    assert traffic.busy(load, roads) == pytest.approx(4 * N / 16e9)


def test_parallel_cables_add_up() -> None:
    devices = (Device("GPU0", "gpu"), Device("GPU1", "gpu"))
    link = Link("GPU0", "GPU1", "xGMI", 50e9)
    assert alone(HostGraph(devices, (link, link))).bandwidth["box", "GPU0", "GPU1"] == 100e9
