"""The machines under clusters/*.json can be planned for: each is read, all its ranks reach each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.routes import SimulatedNetwork, places
from psctl.schedule.algorithms import catalog
from psctl.topology.graph import ClusterGraph
from psctl.topology.host.document import read_cluster_document

CLUSTERS = Path(__file__).parents[2] / "clusters"

EXPECTED = {  # ranks; what the widest and the narrowest pair of ranks get, bytes/s
    "pcie-box": (4, 16e9, 16e9),
    "dgx-1v": (8, 50e9, 16e9),
    "dgx-1v-18gb": (8, 36e9, 16e9),
    "dgx-a100": (8, 300e9, 300e9),
    "two-gpu-nodes": (16, 300e9, 11.95e9),
    "sixteen-gpu-nodes": (128, 300e9, 11.95e9),
    "four-cpu-hosts": (4, 119.5e6, 119.5e6),
}


def preset(name: str) -> ClusterGraph:
    return read_cluster_document(json.loads((CLUSTERS / f"{name}.json").read_text()))


def test_every_preset_is_expected() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_preset_is_described_and_its_ranks_reach_each_other(name: str) -> None:
    assert len(json.loads((CLUSTERS / f"{name}.json").read_text())["about"]) > 40
    cluster = preset(name)
    assert not any(host.graph.findings for host in cluster.hosts)
    network, ranks = SimulatedNetwork(cluster), places(cluster)
    count, widest, narrowest = EXPECTED[name]
    assert len(ranks) == count
    first = [network.route(ranks[0], other) for other in ranks[1:]]
    widths = [min(network.capacities[link] for link in route.links) for route in first]
    assert (max(widths), min(widths)) == pytest.approx((widest, narrowest))
    assert not any("loopback" in network.names[link] for route in first for link in route.links)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"sixteen-gpu-nodes"}))
def test_rings_run_on_them(name: str) -> None:
    cluster = preset(name)
    ranks = places(cluster)
    result = simulate(catalog.build("ring", len(ranks)), SimulatedNetwork(cluster), ranks, 1e8)
    slowest = EXPECTED[name][2]
    assert result.seconds >= 2 * (len(ranks) - 1) / len(ranks) * 1e8 / EXPECTED[name][1]
    assert result.seconds <= 1.2 * 2 * (len(ranks) - 1) / len(ranks) * 1e8 / slowest + 1e-3
