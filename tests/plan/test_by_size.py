"""Only what can win is timed, and what wins is what would win if all were timed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from psctl.message_costs import Costs, StrategyPace
from psctl.plan.by_size import SIZES, SizeRange, size_ranges, winners
from psctl.plan.candidates import TIE, CandidateSearch
from psctl.plan.choose import Planner, Winner, planner_for_cluster
from psctl.plan.plan_input import PlanInput, PlanRequest, plan_input_of_cluster
from psctl.plan.simulation.cost_model import ENGINES, FREE
from psctl.plan.simulation.estimates import lower_bound
from psctl.plan.simulation.flow_simulation import simulate
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode
from psctl.topology.host.document import read_cluster_document
from psctl.types import STRATEGIES

ROOT = Path(__file__).parents[2]


def preset(name: str) -> ClusterGraph:
    return read_cluster_document(json.loads((ROOT / "clusters" / f"{name}.json").read_text()))


def somewhere(chance: random.Random, count: int) -> ClusterGraph:
    """Hosts on one to three switches, with cables and trunks of any rate; some hosts serve alone."""
    racks = chance.randint(1, 3)
    roles = [("worker", "server"), ("worker",), ("server",)]
    hosts = [
        HostNode(f"h{at}", HostGraph(), roles=roles[0] if at < 2 else chance.choices(roles, (6, 2, 2))[0])
        for at in range(count)
    ]
    rates = (12.5e6, 62.5e6, 125e6, 125e6, 1.25e9)
    cables = [
        Between(host.name, f"sw{at % racks}", chance.choice(rates), chance.choice((1e-5, 1e-4)))
        for at, host in enumerate(hosts)
    ]
    trunks = [Between("sw0", f"sw{rack}", chance.choice(rates), 1e-5) for rack in range(1, racks)]
    return ClusterGraph(tuple(hosts), (*cables, *trunks))


def grounds() -> Iterator[tuple[str, PlanInput]]:
    for name in ("dgx-1v", "dgx-a100", "pcie-box", "four-cpu-hosts"):
        yield name, plan_input_of_cluster(preset(name), None, FREE)
    yield "dear messages", plan_input_of_cluster(preset("four-cpu-hosts"), None, ENGINES)
    for seed in range(6):
        chance = random.Random(seed)
        costs = ENGINES if seed % 2 else FREE
        yield f"seed {seed}", plan_input_of_cluster(somewhere(chance, chance.randint(3, 6)), None, costs)


GROUNDS = dict(grounds())


SELDOM = ("seed 2", "seed 3", "seed 5")
"""In `make soak` only."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SELDOM else name for name in GROUNDS]
)
def test_the_winner_is_the_plans_choice(name: str) -> None:
    planner = planner_for_cluster(GROUNDS[name], PlanRequest())
    for size in (1_000, 300_000, 20_000_000):
        plan = planner.plan(size)
        assert planner.winner(size) == Winner(size, plan.chosen, plan.seconds)


@pytest.mark.parametrize("name", ["dgx-1v", "dear messages", "seed 3"])
def test_nothing_is_faster_than_its_floor(name: str) -> None:
    search = CandidateSearch(GROUNDS[name])
    for strategy in STRATEGIES:
        if strategy == "ps" or search.why_not(strategy):
            continue
        for size in (0, 1_000, 10_000_000):
            best = search.best(strategy, size).seconds
            assert search.least_seconds(strategy, size) <= best * (1 + 1e-9), (strategy, size)


def test_a_floor_is_tight_where_one_thing_alone_counts() -> None:
    inputs = GROUNDS["four-cpu-hosts"]
    plan = catalog.build("ring", 4, ScheduleOptions())
    low = lower_bound(plan, inputs.network, inputs.ranks, 0.0)
    wait = inputs.network.route(*inputs.ranks[:2]).latency
    assert low.waiting == pytest.approx(6 * wait)
    assert low.per_byte == pytest.approx(1.5 / 119.5e6, rel=0.01)
    assert simulate(plan, inputs.network, inputs.ranks, 1e9).seconds == pytest.approx(low.seconds(1e9), rel=1e-3)
    assert simulate(plan, inputs.network, inputs.ranks, 0.0).seconds == pytest.approx(low.seconds(0.0))
    assert low.seconds(1e9, StrategyPace(2.0)) == low.seconds(1e9) > low.seconds(1e9, StrategyPace(0.5))
    assert low.seconds(0.0, StrategyPace(1.0, 2.0)) == low.seconds(0.0) > low.seconds(0.0, StrategyPace(1.0, 0.5))


def test_of_many_ranks_only_what_can_be_chosen_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = plan_input_of_cluster(preset("sixteen-gpu-nodes"), 18)
    pruned = planner_for_cluster(inputs, PlanRequest()).plan(160_000_000)
    monkeypatch.setattr(CandidateSearch, "estimate", CandidateSearch.best)
    whole = planner_for_cluster(inputs, PlanRequest()).plan(160_000_000)
    assert (pruned.chosen, pruned.seconds, pruned.options) == (whole.chosen, whole.seconds, whole.options)
    exact = {row.strategy: row.seconds for row in whole.candidates}
    for row in pruned.candidates:
        if row.seconds is not None:
            assert row.seconds >= TIE * (whole.seconds or 0.0) or row.seconds == exact[row.strategy]
    assert {row.strategy for row in pruned.candidates} == set(STRATEGIES)


def test_winners_and_where_they_change() -> None:
    planner = planner_for_cluster(GROUNDS["dear messages"], PlanRequest())
    found = winners(planner.winner, SIZES[:6:2])
    assert [one.size for one in found] == [1_000, 100_000, 10_000_000]
    changes = size_ranges(planner.winner, found)
    assert changes[0] == SizeRange(0, found[0].chosen)
    assert changes[-1].chosen == found[-1].chosen
    assert [one.start for one in changes] == sorted(one.start for one in changes)


def test_a_change_is_found_to_within_a_quarter_decade() -> None:
    asked: list[int] = []

    def winner(size: int) -> Winner:
        asked.append(size)
        return Winner(size, "ring" if size >= 43_000 else "one-shot", 0.0)

    [first, change] = size_ranges(winner, winners(winner, (1_000, 10_000, 100_000)))
    assert first == SizeRange(0, "one-shot") and change.chosen == "ring"
    assert 43_000 / 1.78 <= change.start <= 43_000 * 1.78
    assert len(asked) == 5


def test_what_was_requested_wins_at_every_size() -> None:
    planner = planner_for_cluster(GROUNDS["four-cpu-hosts"], PlanRequest("chain"))
    assert size_ranges(planner.winner, winners(planner.winner)) == [SizeRange(0, "chain")]


def test_costs_are_part_of_the_floor() -> None:
    inputs = GROUNDS["four-cpu-hosts"]
    dear = PlanInput(inputs.cluster, inputs.ranks, inputs.serving, {"psctl": Costs(alpha=1.0), "gloo": Costs()})
    assert CandidateSearch(dear).least_seconds("tree", 0) >= 4.0
    assert CandidateSearch(dear).least_seconds("native", 0) < 1.0
    assert Planner(dear, [], PlanRequest(servers=0)).winner(1_000).chosen == "native"
    assert msgspec.to_builtins(Winner(1, "ring", None)) == {"size": 1, "chosen": "ring", "seconds": None}
