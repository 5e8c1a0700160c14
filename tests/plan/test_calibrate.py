"""Costs come out of measurements that were made with them."""

from __future__ import annotations

import random

import pytest

from psctl.message_costs import (
    UNKNOWN_COSTS,
    Costs,
    MeasuredCosts,
    MeasuredRanks,
    MeasuredSize,
    RanksCosts,
    StrategyPace,
)
from psctl.orders import HostOrder
from psctl.plan.calibrate import fit
from psctl.plan.candidates import CandidateSearch
from psctl.plan.plan_input import PlanInput, nominal_cluster
from psctl.plan.simulation.cost_model import costs_on_shared_cores
from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.schedule.algorithms.catalog import ScheduleOptions, build
from psctl.schedule.schedule import Schedule
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode

RATE = 25e6
SIZES = (1_000, 64_000, 1_000_000, 16_000_000)


def network() -> SimulatedNetwork:
    hosts = tuple(HostNode(f"h{i}", HostGraph()) for i in range(4))
    edges = tuple(Between(f"h{i}", "network", RATE, 5e-5) for i in range(4))
    return SimulatedNetwork(ClusterGraph(hosts, edges))


def cases() -> list[tuple[Schedule, int]]:
    built = [
        build("ring", 4), build("root", 4), build("halving-doubling", 4), build("one-shot", 4),
        build("tree", 4), build("pipelined-chain", 4, ScheduleOptions(chunks=6)),
    ]  # fmt: skip
    return [(schedule, size) for schedule in built for size in SIZES]


def measure(
    costs: Costs, noise: float = 0.0, seed: int = 1
) -> tuple[list[float], list[tuple[Schedule, int]], SimulatedNetwork]:
    chance, net = random.Random(seed), network()
    rows = cases()
    places = [f"h{i}" for i in range(4)]
    seconds = [simulate(s, net, places, size, costs).seconds * (1 + chance.gauss(0, noise)) for s, size in rows]
    return seconds, rows, net


@pytest.mark.parametrize(
    "truth",
    [Costs(3e-4, 1e-4, 1e-9), Costs(0.0, 4e-4, 0.0), Costs(1e-3, 0.0, 4e-9), Costs(5e-5, 2e-5, 2e-10)],
)
def test_costs_come_back_from_what_they_made(truth: Costs) -> None:
    seconds, rows, net = measure(truth)
    places = [f"h{i}" for i in range(4)]

    def predict(index: int, costs: Costs) -> float:
        return simulate(rows[index][0], net, places, rows[index][1], costs).seconds

    found = fit(seconds, predict, Costs(1e-4, 5e-5))
    assert found.after < 0.01
    assert found.after <= found.before
    assert found.costs.alpha == pytest.approx(truth.alpha, rel=0.1, abs=1e-5)
    assert found.costs.overhead == pytest.approx(truth.overhead, rel=0.1, abs=1e-5)
    assert found.costs.gamma == pytest.approx(truth.gamma, rel=0.1, abs=2e-10)


def test_noise_and_a_measurement_far_off_do_not_lead_it_astray() -> None:
    truth = Costs(3e-4, 1e-4, 2e-9)
    seconds, rows, net = measure(truth, noise=0.05)
    seconds[3] *= 8
    places = [f"h{i}" for i in range(4)]
    found = fit(seconds, lambda i, costs: simulate(rows[i][0], net, places, rows[i][1], costs).seconds)
    assert found.after < 0.06
    assert found.costs.alpha + 2 * found.costs.overhead == pytest.approx(5e-4, rel=0.25)


def test_costs_never_fall_below_zero() -> None:
    """Everything took less time than bytes on links alone would."""
    found = fit([0.5, 0.05], lambda i, c: (1.0, 0.1)[i] + 10 * (c.alpha + c.overhead) + c.gamma * 1e6, Costs(1e-3))
    assert (found.costs.alpha, found.costs.overhead, found.costs.gamma) == (0.0, 0.0, 0.0)


def test_without_measurements_it_stays_where_it_began() -> None:
    start = Costs(1e-4, 2e-5, 3e-10)
    assert fit([], lambda i, c: 1.0, start).costs == start


def test_a_pace_stretches_what_flows_and_nothing_else() -> None:
    order = [HostOrder(f"h{i}", f"10.0.0.{i}", "eth0", 2, 0, 1, True, RATE) for i in range(4)]
    plain = PlanInput(nominal_cluster(order), [host.name for host in order], [host.name for host in order])
    slow = PlanInput(
        nominal_cluster(order),
        [host.name for host in order],
        [host.name for host in order],
        paces={"ring": StrategyPace(1.5)},
    )
    for strategy in ("ring", "sharded"):
        before, after = (
            CandidateSearch(inputs).predict(strategy, ScheduleOptions(), 1e6).timing for inputs in (plain, slow)
        )
        assert after.flowing == pytest.approx(before.flowing * (1.5 if strategy == "ring" else 1.0))
        assert after.seconds - after.flowing == pytest.approx(before.seconds - before.flowing)


def test_messages_that_wait_longer_make_small_vectors_slow_and_leave_large_ones_alone() -> None:
    order = [HostOrder(f"h{i}", f"10.0.0.{i}", "eth0", 2, 0, 1, True, RATE) for i in range(4)]
    names, costs = [host.name for host in order], {"psctl": Costs(1e-3)}
    plain, slow = (
        CandidateSearch(PlanInput(nominal_cluster(order), names, names, costs, paces))
        for paces in ({}, {"ring": StrategyPace(1.0, 3.0)})
    )
    small, large = (
        [search.predict("ring", ScheduleOptions(), size).timing for search in (plain, slow)] for size in (4e3, 1e9)
    )
    assert small[1].seconds == pytest.approx(3 * small[0].seconds, rel=0.05)
    assert large[1].seconds == pytest.approx(large[0].seconds, rel=0.01)


def test_measurements_that_do_not_depend_on_a_cost_leave_it_unchanged() -> None:
    start = Costs(4e-4, 2e-4, 5e-10)
    found = fit([1.0, 2.0], lambda i, c: (1.1, 1.9)[i] + 1e-3 * c.overhead, start)
    assert found.costs.alpha == pytest.approx(start.alpha)
    assert found.costs.overhead == pytest.approx(start.overhead, rel=0.01)
    assert found.costs.gamma == pytest.approx(start.gamma)


def test_ranks_that_share_processors_wait_for_each_other_when_all_are_busy() -> None:
    """Eight ranks on one kernel with two cores: a step in which all send takes four times the work, a chain's none."""
    costs = Costs(alpha=1e-4, overhead=2e-4)
    doubling, chain = (build(name, 8, ScheduleOptions()) for name in ("recursive-doubling", "chain"))
    assert costs_on_shared_cores(costs, doubling, 4.0).alpha == pytest.approx(1e-4 + 2 * 4 * 2e-4)
    assert costs_on_shared_cores(costs, chain, 4.0).alpha == pytest.approx(1e-4 + 2 * 2e-4)
    several = build("ring", 4, ScheduleOptions())
    assert costs_on_shared_cores(costs, several, 2.0) == Costs(alpha=1e-4, overhead=4e-4)


def test_a_measured_size_has_its_own_factor() -> None:
    pace = StrategyPace(measured=(MeasuredSize(4e3, 2.0), MeasuredSize(64e3, 0.5), MeasuredSize(1e6, 1.5)))
    assert [pace.factor(size) for size in (1.0, 4e3, 64e3, 1e6)] == pytest.approx([2.0, 2.0, 0.5, 1.5])
    assert pace.factor(16e3) == pytest.approx(1.0)  # halfway on both logarithmic scales
    # above the largest size the seconds that were measured in addition stay the same
    assert 10e6 * (pace.factor(10e6) - 1) == pytest.approx(1e6 * 0.5)
    assert (pace.least, pace.unmeasured) == (0.5, StrategyPace())
    assert (StrategyPace().factor(5.0), StrategyPace().least) == (1.0, 1.0)


def test_factors_of_sizes_hold_for_the_measured_ranks_only() -> None:
    pace = StrategyPace(1.5, 2.0, (MeasuredSize(4e3, 2.0),))
    costs = RanksCosts({"psctl": Costs(1e-3)}, {"ring": pace})
    known = MeasuredCosts((MeasuredRanks({"a": 2, "b": 2}, costs),))
    assert known.for_ranks({"a": 2, "b": 2}) == costs
    others = known.for_ranks({"a": 1, "b": 1})
    assert (others.engines, others.paces) == (costs.engines, {"ring": StrategyPace(1.5, 2.0)})
    assert known.for_ranks({"b": 2, "a": 2}).paces == others.paces  # rank 0 is on another host
    assert UNKNOWN_COSTS.for_ranks({"a": 1}) == RanksCosts()


def test_the_ranks_of_the_nearest_number_stand_in_for_what_was_not_measured() -> None:
    def measured(hosts: str, alpha: float, *more: str) -> MeasuredRanks:
        paces = {"ring": StrategyPace(alpha, 1.0, (MeasuredSize(4e3, alpha),))}
        costs = RanksCosts({name: Costs(alpha) for name in ("psctl", *more)}, paces)
        return MeasuredRanks(dict.fromkeys(hosts, 1), costs)

    eight, four, two = measured("abcdefgh", 8.0, "ps"), measured("abcd", 4.0), measured("ab", 2.0, "ps", "gloo")
    known = MeasuredCosts((four, eight, two))
    found = known.for_ranks(dict.fromkeys("abcd", 1))
    assert found.paces == four.costs.paces
    assert {name: costs.alpha for name, costs in found.engines.items()} == {"psctl": 4.0, "ps": 8.0, "gloo": 2.0}
    assert known.for_ranks(dict.fromkeys("abcdefgh", 1)).engines["gloo"] == Costs(2.0)
    for count, nearest in ((1, 2.0), (3, 4.0), (5, 4.0), (6, 8.0), (100, 8.0)):
        found = known.for_ranks(dict.fromkeys("abcdefgh"[:count], 1) if count < 9 else {"a": count})
        assert found.engines["psctl"] == Costs(nearest), count
        assert found.paces == {"ring": StrategyPace(nearest)}


def test_near_a_measured_size_its_options_are_taken() -> None:
    order = [HostOrder(f"h{i}", f"10.0.0.{i}", "eth0", 2, 0, 1, True, RATE) for i in range(4)]
    names, costs = [host.name for host in order], {"psctl": Costs(1e-4, 1e-4)}
    pace = StrategyPace(measured=(MeasuredSize(64e3, 1.0, {"chunks": 3}), MeasuredSize(1e6, 1.0, {"chunks": 5})))
    measured, plain = (
        CandidateSearch(PlanInput(nominal_cluster(order), names, names, costs, paces))
        for paces in ({"pipelined-chain": pace}, {})
    )
    chosen = {size: measured.best("pipelined-chain", size).options.chunks for size in (20e3, 64e3, 255e3, 400e3, 3.9e6)}
    assert list(chosen.values()) == [3, 3, 3, 5, 5]
    for size in (1e3, 50e6):
        assert measured.best("pipelined-chain", size).options == plain.best("pipelined-chain", size).options


@pytest.mark.parametrize("count", [4, 12, 80])
def test_a_measured_time_is_predicted_and_never_excluded_by_a_bound(count: int) -> None:
    order = [HostOrder(f"h{i}", f"10.0.0.{i}", "eth0", 2, 0, 1, True, RATE * (1 + i % 2)) for i in range(count)]
    names, costs = [host.name for host in order], {"psctl": Costs(1e-4, 1e-4)}
    found = {}
    for name, factors in (("plain", ()), ("slow", (3.0,)), ("fast", (0.25,))):
        sizes = tuple(MeasuredSize(1e6, each, {"pieces": 1}) for each in factors)
        paces = {"ring": StrategyPace(1.2, 1.1, sizes)}
        search = CandidateSearch(PlanInput(nominal_cluster(order), names, names, costs, paces))
        best = search.best("ring", 1e6)
        parts = best.timing.flowing + best.timing.waiting + best.timing.summing
        assert best.seconds == pytest.approx(parts, rel=0.05)
        assert search.least_seconds("ring", 1e6) <= best.seconds
        found[name] = (best.seconds, search.quick_estimate("ring", 1e6)[0])
    for name, factor in (("slow", 3.0), ("fast", 0.25)):
        assert found[name] == pytest.approx([factor * seconds for seconds in found["plain"]], rel=1e-6)


def test_pieces_that_overlap_occupy_processors_that_ranks_share() -> None:
    """1 MB in 16 pieces by pairs of four hosts: 64 messages a rank, and two ranks a core; measured 46 ms."""
    order = [HostOrder(f"h{i}", f"10.0.0.{i}", "eth0", 2, 0, 1, True, RATE * (2.3 + i / 100)) for i in range(4)]
    names, options = [host.name for host in order], ScheduleOptions(groups=((0, 1), (2, 3)), pieces=16)
    alone, shared = (
        CandidateSearch(PlanInput(nominal_cluster(order), names, names, {"psctl": Costs(1e-4, 1.5e-4)}, {}, each))
        .predict("hierarchical", options, 1e6)
        .seconds
        for each in (1.0, 2.0)
    )
    assert alone < 0.03
    assert 0.038 <= shared <= 0.05
    best = CandidateSearch(
        PlanInput(nominal_cluster(order), names, names, {"psctl": Costs(1e-4, 1.5e-4)}, {}, 2.0)
    ).best("hierarchical", 1e6)
    assert best.options.pieces < 16
