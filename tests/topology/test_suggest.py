"""Which way suits which machine: the textbook's numbers, closed forms, partial machines, clusters."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings

from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Link, Suggestion
from psctl.topology.rings import rings
from psctl.topology.suggest import candidates, suggest
from psctl.topology.wires import Wires, wires
from psctl.words import STRATEGIES
from tests.topology.fabrics import behind_switch, dgx1v, meshes, named, nvswitch

MB = 1e6


def alone(graph: HostGraph) -> ClusterGraph:
    return ClusterGraph((HostNode("box", graph),))


def times(cluster: ClusterGraph, size: float = 100 * MB) -> dict[str, float]:
    """Seconds by name; the best of those with the same name."""
    found: dict[str, float] = {}
    for one in candidates(cluster, size):
        found[one.name] = min(one.seconds, found.get(one.name, one.seconds))
    return found


def kept(graph: HostGraph, ids: tuple[int, ...]) -> HostGraph:
    """The host with some of its GPUs."""
    gone = {gpu.id for gpu in graph.of_kind("gpu")} - {f"GPU{at}" for at in ids}
    devices = tuple(device for device in graph.devices if device.id not in gone)
    return HostGraph(devices, tuple(link for link in graph.links if not link.ends & gone))


def on_network(graphs: list[HostGraph], rate: float | None = 1.195e9, latency: float = 25e-6) -> ClusterGraph:
    hosts = tuple(HostNode(f"h{at}", graph) for at, graph in enumerate(graphs))
    return ClusterGraph(hosts, tuple(Between(host.name, "network", rate, latency) for host in hosts))


def sound(found: Suggestion) -> None:
    assert found.name in STRATEGIES and found.reason and "\n" not in found.reason
    assert len(found.groups) == len(found.shares) and sum(found.shares) == pytest.approx(1)


def test_four_gpus_behind_one_switch_sum_a_quarter_each() -> None:
    """The textbook's 15 ms against 60 over one GPU and 80 over the processor, for 160 MB at 16 GB/s."""
    found = suggest(alone(behind_switch(4)), 160 * MB)
    sound(found)
    assert found.name == "sharded" and found.groups == (named(4),) and found.shares == (1.0,)
    assert "15 ms" in found.reason and "60 ms (root)" in found.reason and "80 ms (cpu)" in found.reason
    spent = times(alone(behind_switch(4)), 160 * MB)
    assert spent["sharded"] == pytest.approx(15e-3, rel=1e-3) and spent["ring"] == pytest.approx(15e-3, rel=1e-3)
    assert spent["root"] == pytest.approx(60e-3, rel=1e-3) and spent["cpu"] == pytest.approx(80e-3, rel=1e-3)
    assert spent["one-shot"] == pytest.approx(30e-3, rel=1e-3)


@pytest.mark.parametrize(("rate", "expected"), [(18e9, 2.593e-3), (25e9, 1.867e-3)])
def test_the_hybrid_cube_mesh_gets_its_two_rings(rate: float, expected: float) -> None:
    """2 x 7/8 x 160 MB over six link directions, FORMULAS 2.12."""
    cluster = alone(dgx1v(rate))
    found = suggest(cluster, 160 * MB)
    sound(found)
    assert found.name == "multi-ring" and found.shares == (2 / 3, 1 / 3)
    assert found.groups == tuple(ring.order for ring in rings(wires(dgx1v(rate))).rings)
    assert times(cluster, 160 * MB)["multi-ring"] == pytest.approx(expected, rel=5e-3)
    assert "24 of their 24" in found.reason


def test_a_host_that_may_only_serve_does_not_hide_the_rings_of_the_one_that_works() -> None:
    other = HostNode("spare", HostGraph(), roles=("server",))
    found = suggest(ClusterGraph((HostNode("box", dgx1v()), other), (Between("box", "spare", 1e9),)))
    sound(found)
    assert found.name == "multi-ring" and found.groups[0][:2] == ("box/GPU0", "box/GPU3")
    assert "(cpu)" in found.reason


def test_partial_machines_without_a_ring_get_trees() -> None:
    """Whatever GPUs of the hybrid cube mesh one is given, if direct links join them, they are used."""
    for count in range(3, 9):
        for ids in itertools.combinations(range(8), count):
            graph = kept(dgx1v(), ids)
            net = wires(graph)
            found = suggest(alone(graph))
            sound(found)
            if not net.connected:
                continue
            if rings(net).rings:
                assert found.name in ("multi-ring", "packed-trees")
            else:
                assert found.name == "packed-trees"
            if found.name == "packed-trees":
                assert len(found.trees) == len(found.groups)
                for group, tree in zip(found.groups, found.trees, strict=True):
                    assert sorted(group) == sorted(net.nodes)
                    assert group == (tree[0][0], *(child for _, child in tree))


def test_on_a_switch_of_nvlink_all_have_their_full_rate() -> None:
    found = suggest(alone(nvswitch(8)))
    sound(found)
    least = 2 * 7 / 8 * 100 * MB / 300e9
    spent = times(alone(nvswitch(8)))
    assert spent[found.name] == pytest.approx(least, rel=0.01)
    assert least < spent["ring"] < 1.05 * least
    assert "multi-ring" not in spent and "packed-trees" not in spent


def test_few_bytes_want_few_steps() -> None:
    assert suggest(alone(nvswitch(8)), 1e3).name == "one-shot"
    assert suggest(on_network([HostGraph()] * 8), 1e3).name == "recursive-doubling"


def test_nothing_to_synchronise() -> None:
    for cluster in (alone(nvswitch(1)), alone(HostGraph()), ClusterGraph(())):
        found = suggest(cluster)
        assert found.name in STRATEGIES and "nothing to synchronise" in found.reason
        assert candidates(cluster) == ()


def test_gpus_without_any_way_are_left_to_the_engine() -> None:
    found = suggest(alone(HostGraph((Device("GPU0", "gpu"), Device("GPU1", "gpu")))))
    sound(found)
    assert found.name == "native" and "no way" in found.reason


@pytest.mark.parametrize("count", [2, 3, 4, 8, 12])
def test_hosts_with_one_rank_form_a_ring_or_halve(count: int) -> None:
    found = suggest(on_network([HostGraph()] * count))
    sound(found)
    assert found.name in ("ring", "halving-doubling")
    spent = times(on_network([HostGraph()] * count))
    assert spent["ring"] == pytest.approx(2 * (count - 1) / count * 100 * MB / 1.195e9, rel=0.02)
    assert spent["ps"] == pytest.approx(spent["ring"], rel=0.02)


def test_spare_hosts_serve_by_byteps_split() -> None:
    """Four workers and four spare hosts: M/B instead of 1.5 M/B."""
    hosts = tuple(HostNode(f"g{at}", nvswitch(1)) for at in range(4)) + tuple(
        HostNode(f"c{at}", HostGraph()) for at in range(4)
    )
    cluster = ClusterGraph(hosts, tuple(Between(host.name, "network", 1e9, 1e-6) for host in hosts))
    found = suggest(cluster)
    sound(found)
    assert found.name == "ps" and found.groups == (("c0",), ("c1",), ("c2",), ("c3",)) and found.shares == (0.25,) * 4
    assert times(cluster)["ps"] == pytest.approx(0.1, rel=0.01)
    assert times(cluster)["ring"] == pytest.approx(0.15, rel=0.01)


def test_hosts_with_several_ranks_sum_inside_first() -> None:
    found = suggest(on_network([dgx1v(), dgx1v()]))
    sound(found)
    assert found.name == "hierarchical" and "hosts" in found.reason
    assert found.groups == tuple(tuple(f"h{at}/GPU{gpu}" for gpu in range(8)) for at in range(2))
    # 2 (n-1)/n of all bytes must leave each host.
    assert times(on_network([dgx1v(), dgx1v()]))["hierarchical"] == pytest.approx(100 * MB / 1.195e9, rel=0.03)


def test_each_gpu_leaves_by_its_own_nic() -> None:
    hosts = tuple(HostNode(f"h{at}", dgx1v()) for at in range(2))
    cables = [Between(host.name, "network", 12e9, 2e-6, via=f"mlx5_{nic}") for host in hosts for nic in range(4)]
    four = times(ClusterGraph(hosts, tuple(cables)))["hierarchical"]
    one = times(ClusterGraph(hosts, tuple(cable for cable in cables if cable.via == "mlx5_0")))["hierarchical"]
    assert 3 < one / four < 4.1
    assert four > 100 * MB / (4 * 12e9)


def test_pairs_of_nvlink_within_a_host_are_a_hierarchy_too() -> None:
    graph = behind_switch(4)
    pairs = tuple(Link(f"GPU{at}", f"GPU{at + 1}", "NV4", 100e9, switched=False) for at in (0, 2))
    found = suggest(alone(HostGraph(graph.devices, graph.links + pairs)))
    assert found.name == "hierarchical" and found.groups == (("GPU0", "GPU1"), ("GPU2", "GPU3"))
    assert "NVLink islands" in found.reason


def test_a_trunk_between_racks_is_crossed_as_seldom_as_possible() -> None:
    hosts = tuple(HostNode(f"h{at}", HostGraph(), {"rack": f"r{at % 2}"}) for at in range(8))
    cables = [Between(host.name, f"sw{at % 2}", 1e9, 1e-5) for at, host in enumerate(hosts)]
    cluster = ClusterGraph(hosts, (*cables, Between("sw0", "sw1", 1e9, 1e-5)))
    found = suggest(cluster)
    assert found.name in ("ring", "hierarchical")
    ring = next(one for one in candidates(cluster) if one.name == "ring")
    assert ring.groups == (("h0", "h2", "h4", "h6", "h1", "h3", "h5", "h7"),)
    assert times(cluster)["ring"] < 0.8 * times(cluster)["halving-doubling"]


def test_unknown_rates_are_said() -> None:
    assert "h0 - network" in (reason := suggest(on_network([HostGraph()] * 4, None)).reason) and "not known" in reason
    assert "not known" in suggest(ClusterGraph(tuple(HostNode(f"h{at}", HostGraph()) for at in range(3)))).reason
    assert "not known" in suggest(alone(behind_switch(4, 0.0))).reason
    assert "not known" not in suggest(alone(behind_switch(4))).reason


def test_a_port_of_known_rate_stands_for_the_cable_behind_it() -> None:
    hosts = tuple(HostNode(f"h{at}", HostGraph((Device("eth0", "nic", bandwidth=2e9),))) for at in range(3))
    cluster = ClusterGraph(hosts)
    assert "not known" not in suggest(cluster).reason
    assert times(cluster)["ring"] == pytest.approx(4 / 3 * 100 * MB / 2e9, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(meshes(2, 6))
def test_whatever_the_links_the_answer_is_sound_and_the_best(net: Wires) -> None:
    graph = behind_switch(len(net.nodes))
    links = [Link(net.nodes[a], net.nodes[b], f"NV{n}", n * 25e9, switched=False) for a, b, n in net.links]
    cluster = alone(HostGraph(graph.devices, graph.links + tuple(links)))
    found = suggest(cluster)
    sound(found)
    spent = {one.name: one.seconds for one in candidates(cluster)[::-1]}
    assert spent[found.name] <= 1.01 * min(spent.values())
    assert all(name in STRATEGIES for name in spent)
    assert suggest(cluster) == found


def test_sixteen_hosts_of_eight_gpus_take_no_time() -> None:
    start = time.perf_counter()
    found = suggest(on_network([nvswitch(8)] * 16, 50e9, 2e-6))
    assert time.perf_counter() - start < 3
    sound(found)
    assert found.name == "hierarchical"
