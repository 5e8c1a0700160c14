"""Broadcasts down packed trees (Blink): as fast as the links out of the root, and taken where they are fastest."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import networkx
import pytest

from psctl.plan import rank_orders
from psctl.plan.collective_choice import CollectivePlanner
from psctl.plan.plan_input import plan_input_of_cluster
from psctl.schedule.algorithms import collectives
from psctl.topology.algorithms.direct_links import direct_links
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode
from psctl.topology.host.document import read_cluster_document

DGX = read_cluster_document(json.loads((Path(__file__).parents[2] / "clusters" / "dgx-1v.json").read_text()))
LINK = 25e9
SIZE = 160_000_000


@pytest.mark.parametrize("world", [8, 7, 6, 5, 4, 3])
def test_the_trees_carry_what_the_links_can(world: int) -> None:
    """The bound: the least of the maximum flows from the root to any other GPU, in links."""
    inputs = plan_input_of_cluster(DGX, world)
    trees = rank_orders.broadcast_trees(inputs, rank_orders.ports(inputs))
    used: Counter[tuple[int, int]] = Counter()
    for root, edges, weight in trees:
        assert root == 0
        assert {child for _, child in edges} == set(range(1, world))
        for edge in edges:
            used[edge] += weight
    units = direct_links(DGX.hosts[0].graph, [f"GPU{at}" for at in range(world)]).units()
    graph = networkx.DiGraph()
    for a, row in enumerate(units):
        graph.add_edges_from((a, b, {"capacity": count}) for b, count in enumerate(row) if count)
    links = min(networkx.maximum_flow_value(graph, 0, other) for other in range(1, world))
    assert world < 8 or links == 6
    scale = links / sum(weight for _, _, weight in trees)
    assert all(count * scale <= units[a][b] for (a, b), count in used.items()), "no direction of a link twice"


def test_a_broadcast_on_eight_gpus_takes_the_trees_and_a_sixth_of_a_link_s_time() -> None:
    planner = CollectivePlanner(plan_input_of_cluster(DGX))
    found = {each.algorithm: each.seconds for each in planner.predictions("broadcast", SIZE)}
    assert found["packed-trees"] == pytest.approx(SIZE / (6 * LINK), rel=0.2)
    assert found["packed-trees"] < min(each for name, each in found.items() if name != "packed-trees") / 5
    assert planner.choices("broadcast")[-1].algorithm == "packed-trees"


def test_any_rank_may_be_the_root() -> None:
    options = CollectivePlanner(plan_input_of_cluster(DGX)).choices("broadcast")[-1].options
    for root in range(8):
        assert collectives.build("broadcast", 8, "packed-trees", root=root, options=options).world == 8


def test_hosts_that_cables_join_directly_have_trees_along_them() -> None:
    hosts = tuple(HostNode(name, HostGraph()) for name in ("h0", "h1", "h2"))
    cables = tuple(Between(a, b, 1e8, 1e-5) for a, b in (("h0", "h1"), ("h0", "h2"), ("h1", "h2")))
    inputs = plan_input_of_cluster(ClusterGraph(hosts, cables))
    trees = rank_orders.broadcast_trees(inputs, rank_orders.ports(inputs))
    assert {edges for _, edges, _ in trees} == {((0, 1), (1, 2)), ((0, 2), (2, 1))}
    switched = tuple(Between(host.name, "switch", 1e8, 1e-5) for host in hosts)
    inputs = plan_input_of_cluster(ClusterGraph(hosts, switched))
    port = rank_orders.ports(inputs)
    assert rank_orders.broadcast_trees(inputs, port) == rank_orders.trees(inputs, port)
