"""What topo says of the strategy is what the plan chooses on the same machines, with the groups that it makes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from psctl.launch.measure.saved_output import read_saved
from psctl.launch.measure.strategy_suggestion import suggest
from psctl.launch.placement import job_planning
from psctl.message_costs import UNKNOWN_COSTS, Costs, MeasuredCosts, MeasuredRanks, RanksCosts
from psctl.plan.choose import UNKNOWN, planner_for_cluster
from psctl.plan.plan_input import PlanRequest, plan_input_of_cluster
from psctl.plan.simulation.cost_model import FREE
from psctl.topology.algorithms.direct_links import direct_links
from psctl.topology.algorithms.rings import rings
from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Suggestion
from psctl.types import STRATEGIES
from tests.topology.fabrics import behind_switch, dgx1v, named, nvswitch

CAPTURED = Path(__file__).parents[1] / "captured" / "topo-m"
PRESETS = sorted((Path(__file__).parents[2] / "clusters").glob("*.json"))


def alone(graph: HostGraph) -> ClusterGraph:
    return ClusterGraph((HostNode("box", graph),))


def on_network(graphs: list[HostGraph], rate: float | None = 1.195e9, **more: object) -> ClusterGraph:
    hosts = tuple(HostNode(f"h{at}", graph, **more) for at, graph in enumerate(graphs))
    return ClusterGraph(hosts, tuple(Between(host.name, "network", rate, 25e-6) for host in hosts))


def sound(cluster: ClusterGraph) -> Suggestion:
    found = suggest(cluster)
    assert found is not None
    assert found.name in STRATEGIES and found.reason and "\n" not in found.reason
    assert len(found.groups) == len(found.shares) and sum(found.shares) == pytest.approx(1)
    return found


LARGE = ("dgx-1v", "dgx-a100")
"""Presets whose plans take seconds: `make soak`."""


def kept(graph: HostGraph, ids: tuple[int, ...]) -> HostGraph:
    """The host with some of its GPUs."""
    gone = {gpu.id for gpu in graph.of_kind("gpu")} - {f"GPU{at}" for at in ids}
    devices = tuple(device for device in graph.devices if device.id not in gone)
    return HostGraph(devices, tuple(link for link in graph.links if not link.ends & gone))


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.soak if path.stem in LARGE else ())
        for path in PRESETS if "sixteen" not in path.stem
    ],
)  # fmt: skip
def test_topo_and_plan_agree_on_every_preset(preset: Path) -> None:
    found = sound(read_saved(str(preset)).cluster)
    plan, _ = job_planning.on_paper(str(preset), None, UNKNOWN, None)
    assert (found.name, found.reason) == (plan.chosen, f"100 MB of gradients: {plan.reason}")


def test_the_hybrid_cube_mesh_gets_its_two_rings() -> None:
    found = sound(alone(dgx1v()))
    assert (found.name, found.shares) == ("multi-ring", (2 / 3, 1 / 3))
    assert found.groups == tuple(ring.order for ring in rings(direct_links(dgx1v())).rings)
    spare = HostNode("spare", HostGraph(), roles=("server",))
    found = sound(ClusterGraph((HostNode("box", dgx1v()), spare), (Between("box", "spare", 1e9),)))
    assert found.name == "multi-ring" and found.groups[0][:2] == ("box/GPU0", "box/GPU3")


def test_gpus_that_no_ring_visits_get_trees() -> None:
    seen = 0
    for ids in itertools.combinations(range(8), 4):
        graph = kept(dgx1v(), ids)
        net = direct_links(graph)
        if not net.connected or rings(net).rings:
            continue
        found = sound(alone(graph))
        if found.name == "packed-trees":
            seen += 1
            assert len(found.trees) == len(found.groups)
            for group, tree in zip(found.groups, found.trees, strict=True):
                assert sorted(group) == sorted(net.nodes)
                assert group == (tree[0][0], *(child for _, child in tree))
            return
    assert seen


def test_where_all_is_alike_the_engine_goes_along_the_cables() -> None:
    found = sound(alone(behind_switch(4)))
    assert (found.name, sorted(found.groups[0])) == ("native", sorted(named(4)))


def test_hosts_with_several_ranks_sum_inside_first() -> None:
    found = sound(on_network([dgx1v(), dgx1v()]))
    assert found.name == "hierarchical"
    assert found.groups == tuple(tuple(f"h{at}/GPU{gpu}" for gpu in range(8)) for at in range(2))


def test_spare_hosts_serve() -> None:
    workers = [HostNode(f"g{at}", HostGraph()) for at in range(4)]
    spare = [HostNode(f"c{at}", HostGraph(), roles=("server",)) for at in range(4)]
    cables = tuple(Between(host.name, "network", 1e9, 1e-6) for host in (*workers, *spare))
    found = sound(ClusterGraph((*workers, *spare), cables))
    assert (found.name, found.groups, found.shares) == ("ps", (("c0",), ("c1",), ("c2",), ("c3",)), (0.25,) * 4)


@pytest.mark.parametrize("roles", [("worker",), ()], ids=["without servers", "with servers"])
def test_racks_by_their_label_are_groups(roles: tuple[str, ...]) -> None:
    """Two racks whose hosts hang on one switch each, and a slow trunk: the plan also tries the racks of the labels."""
    more = {"roles": roles} if roles else {}
    hosts = tuple(HostNode(f"h{at}", HostGraph(), {"rack": f"r{at % 2}"}, **more) for at in range(4))
    cables = [Between(host.name, f"sw{at % 2}", 1e9, 1e-5) for at, host in enumerate(hosts)]
    found = sound(ClusterGraph(hosts, (*cables, Between("sw0", "sw1", 2e8, 1e-5))))
    assert (found.name, found.groups) == ("hierarchical", (("h0", "h2"), ("h1", "h3")))


def test_what_is_not_known_is_reported() -> None:
    reason = sound(on_network([HostGraph()] * 4, None)).reason
    assert "h0 - network" in reason and "not known" in reason
    assert "not known" in sound(alone(behind_switch(4, 0.0))).reason
    assert "not known" not in sound(alone(behind_switch(4))).reason
    ported = HostGraph((Device("eth0", "nic", bandwidth=2e9),))
    hosts = tuple(HostNode(f"h{at}", ported) for at in range(3))
    cables = tuple(Between(host.name, "network", via="eth0") for host in hosts)
    assert "not known" not in sound(ClusterGraph(hosts, cables)).reason


def test_where_nothing_is_known_nothing_is_suggested() -> None:
    assert suggest(ClusterGraph(())) is None
    assert suggest(on_network([HostGraph()] * 2, roles=("server",))) is None
    assert "nothing to synchronise" in sound(alone(HostGraph())).reason
    found = suggest(ClusterGraph((HostNode("a", HostGraph()), HostNode("b", HostGraph()))))
    assert found is not None
    assert found.name == "native" and "no path between the ranks" in found.reason


def test_hosts_that_can_be_reached_are_planned_with_what_messages_cost_there() -> None:
    cluster = on_network([HostGraph()] * 4, 1e8)
    dear = MeasuredCosts((MeasuredRanks({"elsewhere": 1}, RanksCosts({"gloo": Costs(1.0)})),))
    assert suggest(cluster, UNKNOWN_COSTS) != suggest(cluster, dear)
    found = suggest(cluster, dear)
    assert found is not None and found.name != "native"


def test_sixteen_gpus_take_no_time() -> None:
    start = time.process_time()
    assert sound(on_network([nvswitch(8)] * 2, 50e9)).name in STRATEGIES
    assert time.process_time() - start < 4.0  # half a second on an idle machine


@pytest.mark.parametrize(
    "name", ["a100pcie-x4-nvlink-pairs-azure-nc96-old", "a6000x3-nv4-pair-node", "gpu4-nv4-pairs-sys-1nic"]
)
def test_leaving_out_strategies_that_cannot_win_changes_no_suggestion(name: str) -> None:
    saved = read_saved(str(CAPTURED / f"{name}.txt")).cluster
    planner = planner_for_cluster(plan_input_of_cluster(saved, costs=FREE), PlanRequest(bucketed=False))
    quick, whole = planner.plan(UNKNOWN, whole=False), planner.plan(UNKNOWN)
    assert (quick.chosen, quick.reason, quick.options) == (whole.chosen, whole.reason, whole.options)
    rows, expected = ({row.strategy: row for row in each.candidates} for each in (quick, whole))
    assert rows[quick.chosen] == expected[quick.chosen]
    estimated = [strategy for strategy, row in rows.items() if row != expected[strategy]]
    assert estimated, "none was left out"
    assert not {quick.chosen, "native"} & set(estimated), "these the reason names"
