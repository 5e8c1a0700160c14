"""Widest paths: the narrowest edge counts, the shortest of equals is taken, GPUs and NICs pass nothing on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.graph import Device, HostGraph, Link
from psctl.topology.host.paths import Path, Router


def host(*edges: tuple[str, str, float], kinds: str = "") -> HostGraph:
    ids = dict.fromkeys(end for a, b, _ in edges for end in (a, b))
    kind = {"G": "gpu", "N": "nic", "C": "cpu", "S": "switch"}
    devices = tuple(Device(one, kind[one[0]]) for one in ids)  # type: ignore[arg-type]
    return HostGraph(devices, tuple(Link(a, b, "PCIe", rate, 1e-6) for a, b, rate in edges))


def widest(graph: HostGraph, a: str, b: str, word: str = "SYS") -> Path | None:
    return Router(graph.devices, graph.edges).pair(a, b, word)


BOX = host(("G0", "S0", 16.0), ("G1", "S0", 16.0), ("G2", "S1", 4.0), ("S0", "C0", 8.0), ("S1", "C0", 16.0),
           ("C0", "C1", 20.0), ("C1", "G3", 16.0))  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "way", "bandwidth"),
    [("G0", "G1", "G0 S0 G1", 16), ("G0", "G2", "G0 S0 C0 S1 G2", 4), ("G0", "G3", "G0 S0 C0 C1 G3", 8),
     ("G3", "C0", "G3 C1 C0", 16)],
)  # fmt: skip
def test_the_way_and_its_width(a: str, b: str, way: str, bandwidth: float) -> None:
    path = widest(BOX, a, b)
    assert path is not None
    assert path.devices == tuple(way.split())
    assert path.bandwidth == bandwidth
    assert path.latency == pytest.approx(1e-6 * (len(path.devices) - 1))


def test_the_bottleneck_is_the_narrowest_edge() -> None:
    path = widest(BOX, "G0", "G3")
    assert path is not None
    assert path.bottleneck.ends == {"S0", "C0"}


def test_a_gpu_passes_nothing_on_though_that_way_were_wider() -> None:
    graph = host(("G0", "G1", 50.0), ("G1", "G2", 50.0), ("G0", "C0", 16.0), ("G1", "C0", 16.0), ("G2", "C0", 16.0))
    path = widest(graph, "G0", "G2")
    assert path is not None
    assert path.devices == ("G0", "C0", "G2")


def test_the_shortest_of_equally_wide_ways_and_what_is_to_be_avoided() -> None:
    graph = host(("G0", "C0", 16.0), ("C0", "C1", 40.0), ("C0", "C2", 40.0), ("C1", "C2", 40.0), ("C2", "G1", 16.0))
    router = Router(graph.devices, graph.edges)
    path = router.pair("G0", "G1", "SYS")
    assert path is not None
    assert path.devices == ("G0", "C0", "C2", "G1")
    assert "G1" not in router.paths("G0", avoid=["C2"])


def test_words_of_pcie_do_not_go_through_a_switch_of_nvlink() -> None:
    slots = host(("G0", "C0", 16.0), ("G1", "C0", 16.0))
    ports = (Link("G0", "S0", "NVLink", 300.0), Link("G1", "S0", "NVLink", 300.0))
    graph = HostGraph((*slots.devices, Device("S0", "switch")), (*slots.links, *ports))
    ways = [widest(graph, "G0", "G1", word) for word in ("NV12", "SYS")]
    assert [way.devices[1] for way in ways if way] == ["S0", "C0"]


def test_no_way_no_path() -> None:
    graph = host(("G0", "S0", 16.0), ("G1", "S1", 16.0))
    assert widest(graph, "G0", "G1") is None
    assert widest(graph, "G0", "G0") is None
    assert widest(graph, "G0", "G9") is None


def test_a_latency_that_is_not_known_makes_the_sum_unknown() -> None:
    graph = HostGraph(BOX.devices, (*BOX.links[1:], Link("G0", "S0", "PCIe", 16.0)))
    path = widest(graph, "G0", "G1")
    assert path is not None
    assert path.latency is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 9)), max_size=14))
def test_no_way_is_wider_than_the_one_that_is_found(rows: list[tuple[int, int, int]]) -> None:
    edges = [(f"S{a}", f"S{b}", float(rate)) for a, b, rate in rows if a != b]
    graph = host(*edges)
    router = Router(graph.devices, graph.edges)
    best = {(one.id, one.id): float("inf") for one in graph.devices}  # Floyd and Warshall's way, for the widest
    for a, b, rate in edges:
        best[a, b] = best[b, a] = max(rate, best.get((a, b), 0.0))
    ids = [one.id for one in graph.devices]
    for mid in ids:
        for a in ids:
            for b in ids:
                best[a, b] = max(best.get((a, b), 0.0), min(best.get((a, mid), 0.0), best.get((mid, b), 0.0)))
    for a in ids:
        for b in ids:
            path = router.pair(a, b, "SYS") if a != b else None
            assert (path.bandwidth if path else 0.0) == (best[a, b] if a != b else 0.0)
