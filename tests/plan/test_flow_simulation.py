"""Simulated times are those that reasoning by hand gives; rates are max-min fair; symmetry changes no time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.message_costs import Costs
from psctl.plan.simulation import flow_rates
from psctl.plan.simulation.flow_rates import ActiveFlows
from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.schedule.schedule import Action, Schedule, Transfer
from tests.desktop_time import desktop_seconds
from tests.hypothesis_profile import examples
from tests.reference.networks import star

MB = 1e6


def schedule(
    transfers: Sequence[tuple[int, int, int, int, Action]], nodes: int, shares: Sequence[int] = (1,), world: int = 0
) -> Schedule:
    """Return a schedule of any transfers: the simulation needs no contract."""
    ordered = tuple(sorted(Transfer(*one) for one in transfers))
    return Schedule("by hand", world or nodes, nodes, tuple(shares), ordered)


def ring(world: int) -> Schedule:
    steps = range(2 * (world - 1))
    return schedule(
        [
            (step, rank, (rank + 1) % world, (rank - step) % world, "reduce" if step < world - 1 else "copy")
            for step in steps
            for rank in range(world)
        ],
        world,
        (1,) * world,
    )


def sharded(world: int) -> Schedule:
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    there: list[tuple[int, int, int, int, Action]] = [(0, a, b, b, "reduce") for a, b in pairs]
    back: list[tuple[int, int, int, int, Action]] = [(1, a, b, a, "copy") for a, b in pairs]
    return schedule(there + back, world, (1,) * world)


def on_star(
    plan: Schedule, bandwidth: float = 100 * MB, latency: float = 0.0, size: float = 100 * MB, costs: Costs = Costs(),  # noqa: B008
) -> float:  # fmt: skip
    network = SimulatedNetwork(star(plan.nodes, bandwidth, latency))
    return simulate(plan, network, names(plan.nodes), size, costs, method="simulated").seconds


def names(count: int) -> list[str]:
    return [f"node{index}" for index in range(count)]


def test_one_message_takes_its_latency_and_its_bytes() -> None:
    assert on_star(schedule([(0, 0, 1, 0, "copy")], 2), latency=0.25) == pytest.approx(1.25)


def test_two_into_one_port_share_it_and_are_summed_one_after_the_other() -> None:
    both = schedule([(0, 0, 2, 0, "reduce"), (0, 1, 2, 0, "reduce")], 3)
    assert on_star(both) == pytest.approx(2.0)
    assert on_star(both, costs=Costs(gamma=1e-8)) == pytest.approx(4.0)


def test_both_directions_of_a_cable_are_used_at_once() -> None:
    assert on_star(schedule([(0, 0, 1, 0, "reduce"), (0, 1, 0, 0, "reduce")], 2)) == pytest.approx(1.0)


def test_a_step_is_no_barrier() -> None:
    # 0 -> 1 of one chunk and, a step later, 2 -> 3 of another have nothing to do with each other.
    apart = schedule([(0, 0, 1, 0, "copy"), (1, 2, 3, 1, "copy")], 4, (1, 1))
    assert on_star(apart) == pytest.approx(0.5)
    following = schedule([(0, 0, 1, 0, "copy"), (1, 1, 2, 0, "copy")], 3)
    assert on_star(following) == pytest.approx(2.0)


def test_a_sender_waits_for_all_that_earlier_steps_bring_it() -> None:
    waits = schedule([(0, 0, 2, 0, "reduce"), (1, 1, 2, 0, "reduce"), (2, 2, 0, 0, "copy")], 3)
    assert on_star(waits) == pytest.approx(3.0)


def test_a_copy_waits_until_what_it_overwrites_was_sent_on() -> None:
    # 1 sends its chunk to 0 and 2 for 2 s; only then may 3's copy land on it.
    late = schedule([(0, 1, 0, 0, "copy"), (0, 1, 2, 0, "copy"), (1, 3, 1, 0, "copy")], 4)
    assert on_star(late) == pytest.approx(3.0)


def test_a_lane_of_a_node_sends_one_step_after_the_other_and_gets_one_after_the_other() -> None:
    out = schedule([(0, 0, 1, 0, "copy"), (1, 0, 2, 1, "copy")], 3, (1, 1))
    into = schedule([(0, 1, 0, 0, "copy"), (1, 2, 0, 1, "copy")], 3, (1, 1))
    for plan in (out, into):
        assert on_star(plan, latency=0.25) == pytest.approx(1.5)
    assert on_star(schedule([(0, 0, 1, 0, "copy"), (0, 0, 2, 1, "copy")], 3, (1, 1)), latency=0.25) == (
        pytest.approx(1.25)
    ), "messages of one step share the port"


def test_messages_between_two_nodes_keep_their_order_on_a_lane_and_lanes_run_side_by_side() -> None:
    one = schedule([(0, 0, 1, 0, "copy"), (1, 0, 1, 1, "copy")], 2, (1, 1))
    assert on_star(one, latency=0.25) == pytest.approx(1.5)  # the second waits for the first, and its own latency
    lanes = Schedule("by hand", 2, 2, (1, 1), (Transfer(0, 0, 1, 0, "copy"), Transfer(1, 0, 1, 1, "copy", 1)))
    assert on_star(lanes, latency=0.25) == pytest.approx(1.25)


def test_chunks_of_one_step_between_two_nodes_are_one_message() -> None:
    assert on_star(schedule([(0, 0, 1, chunk, "copy") for chunk in range(4)], 2, (1,) * 4), latency=0.25) == (
        pytest.approx(1.25)
    )


def test_overhead_keeps_a_processor_from_its_next_message_and_latency_does_not() -> None:
    spread = schedule([(0, 0, rank, rank - 1, "copy") for rank in range(1, 5)], 5, (1,) * 4)
    assert on_star(spread, size=0.0, latency=0.5) == pytest.approx(0.5)
    assert on_star(spread, size=0.0, costs=Costs(overhead=0.25)) == pytest.approx(4 * 0.25 + 0.25)


def test_it_reports_what_the_time_was_spent_on() -> None:
    network = SimulatedNetwork(star(4, 100 * MB, 0.01))
    result = simulate(ring(4), network, names(4), 100 * MB, Costs(gamma=1e-9), method="simulated")
    assert (result.waiting, result.flowing, result.summing) == pytest.approx((6 * 0.01, 1.5, 0.075))
    assert result.waiting + result.flowing + result.summing == pytest.approx(result.seconds)
    assert result.busiest == pytest.approx(1.5)
    assert (result.bottleneck, result.alike) == ("node0 -> network", 7)
    assert simulate(ring(4), network, names(4), 1000.0).bottleneck == "latency"
    assert simulate(ring(4), network, names(4), 100 * MB, Costs(gamma=1e-6)).bottleneck == "sums"


def test_what_sends_nothing_takes_no_time() -> None:
    assert on_star(schedule([], 2)) == 0.0


# -- one rank for all


@pytest.mark.parametrize("build", [ring, sharded])
@pytest.mark.parametrize("world", [2, 3, 8, 13])
def test_one_rank_stands_for_all_where_all_do_the_same(build: object, world: int) -> None:
    plan = build(world)  # type: ignore[operator]
    network, costs = SimulatedNetwork(star(world, 100 * MB, 1e-4)), Costs(alpha=1e-5, gamma=1e-9)
    short = simulate(plan, network, names(world), 30 * MB, costs)
    long = simulate(plan, network, names(world), 30 * MB, costs, method="simulated")
    assert (short.method, long.method) == ("symmetry", "simulated")
    assert short.seconds == pytest.approx(long.seconds, rel=1e-9)
    assert short.busiest == pytest.approx(long.busiest)
    assert (short.bottleneck, short.alike) == (long.bottleneck, long.alike)


def test_what_is_not_the_same_for_all_is_simulated() -> None:
    network = SimulatedNetwork(star(4, 100 * MB))
    uneven = Schedule("by hand", 4, 4, (1, 2, 3, 4), ring(4).transfers)
    to_root = schedule([(0, rank, 0, 0, "reduce") for rank in (1, 2, 3)], 4)
    # Every rank sends once a step, but on two lanes: the second step's messages wait for nothing.
    apart = tuple(
        Transfer(step, rank, (rank + 1 + step) % 4, rank * 2 + step, "copy", lane=step)
        for step in (0, 1)
        for rank in range(4)
    )
    loose = Schedule("by hand", 4, 4, (1,) * 8, apart)
    for plan in (uneven, to_root, loose):
        assert simulate(plan, network, names(4), MB).method == "simulated"


# -- fair rates


def fair_rates(flows: dict[tuple[int, ...], int], capacities: list[float]) -> dict[tuple[int, ...], float]:
    across: dict[int, list[tuple[int, ...]]] = {}
    for route in flows:
        for link in route:
            across.setdefault(link, []).append(route)
    return flow_rates.fair_rates(flows, across, capacities)


def slow_fair_rates(flows: list[tuple[int, ...]], capacities: list[float]) -> list[float]:
    """Grow all rates by ever smaller steps; a flow stops when a link on its way is full."""
    rates, growing, step = [0.0] * len(flows), set(range(len(flows))), 1.0
    while growing and step > 1e-7:
        for flow in growing:
            rates[flow] += step
        used = [sum(rate for rate, flow in zip(rates, flows, strict=True) if link in flow)
                for link in range(len(capacities))]  # fmt: skip
        full = {link for link, capacity in enumerate(capacities) if used[link] > capacity + 1e-12}
        if not full:
            continue
        for flow in growing:
            rates[flow] -= step
        if step > 2e-7:
            step /= 2
            continue
        growing -= {flow for flow in growing if full & set(flows[flow])}
        step = 1.0
    return rates


@settings(max_examples=examples(60))
@given(st.data())
def test_rates_are_those_of_slow_filling(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    capacities = data.draw(st.lists(st.integers(1, 9).map(float), min_size=count, max_size=count))
    one = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True).map(tuple)
    flows: list[tuple[int, ...]] = data.draw(st.lists(one, min_size=1, max_size=8))
    fast = fair_rates({flow: flows.count(flow) for flow in flows}, capacities)
    assert [fast[flow] for flow in flows] == pytest.approx(slow_fair_rates(flows, capacities), abs=1e-4)


@settings(max_examples=examples(200))
@given(st.data())
def test_rates_fill_a_link_on_every_way_where_none_is_faster(data: st.DataObject) -> None:
    """The property that makes rates max-min fair: each flow crosses a full link on which no other is faster."""
    count = data.draw(st.integers(1, 12))
    capacities = data.draw(st.lists(st.floats(0.1, 100.0), min_size=count, max_size=count))
    one = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True).map(tuple)
    flows: dict[tuple[int, ...], int] = data.draw(st.dictionaries(one, st.integers(1, 5), min_size=1, max_size=20))
    rates = fair_rates(flows, capacities)
    used = [sum(rates[flow] * number for flow, number in flows.items() if link in flow) for link in range(count)]
    assert all(used[link] <= capacities[link] * (1 + 1e-6) for link in range(count))
    for flow in flows:
        assert any(
            used[link] >= capacities[link] * (1 - 1e-6)
            and all(rates[other] <= rates[flow] * (1 + 1e-6) for other in flows if link in other)
            for link in flow
        )


def slow_ends(starts: list[tuple[float, tuple[int, ...], float]], capacities: list[float]) -> list[float]:
    """When each flow of (start, route, size) ends, all rates computed anew at every event."""
    left = {index: size for index, (_, _, size) in enumerate(starts)}
    ends, now = [0.0] * len(starts), 0.0
    while left:
        going = [index for index in left if starts[index][0] <= now]
        routes = [starts[index][1] for index in going]
        rates = fair_rates({route: routes.count(route) for route in routes}, capacities)
        done = [now + left[index] / rates[starts[index][1]] for index in going]
        later = [start for start, _, _ in starts if start > now]
        soonest = min([*done, *later])
        for index, end in zip(going, done, strict=True):
            left[index] -= rates[starts[index][1]] * (soonest - now)
            if end <= soonest + 1e-9:
                ends[index] = soonest
                del left[index]
        now = soonest
    return ends


@settings(max_examples=examples(100))
@given(st.data())
def test_computing_only_what_a_change_touches_changes_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    capacities = data.draw(st.lists(st.integers(1, 9).map(float), min_size=count, max_size=count))
    route = st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True).map(tuple)
    one = st.tuples(st.integers(0, 5).map(float), route, st.integers(1, 9).map(float))
    starts: list[tuple[float, tuple[int, ...], float]] = data.draw(st.lists(one, min_size=1, max_size=10))
    flowing, ends = ActiveFlows(capacities), [0.0] * len(starts)
    waiting = sorted(range(len(starts)), key=lambda index: starts[index][0], reverse=True)
    while waiting or flowing.next_end() < float("inf"):
        now = min(flowing.next_end(), starts[waiting[-1]][0] if waiting else float("inf"))
        for index in flowing.remove_ended(now):
            ends[index] = now
        while waiting and starts[waiting[-1]][0] <= now:
            index = waiting.pop()
            flowing.add(starts[index][1], starts[index][2], index, now)
        flowing.update_rates(now)
    assert ends == pytest.approx(slow_ends(starts, capacities), rel=1e-6, abs=1e-6)


# -- speed


@pytest.mark.parametrize("build", [ring, sharded])
def test_sixty_four_ranks_take_under_a_second(build: object) -> None:
    plan = build(64)  # type: ignore[operator]
    network = SimulatedNetwork(star(64, 1e9, 1e-5))
    taken = []
    for _ in range(3):  # the least of them: others want these cores too
        before = time.process_time()
        result = simulate(plan, network, names(64), 100 * MB, method="simulated")
        taken.append(time.process_time() - before)
    assert desktop_seconds(min(taken)) < 1.0
    assert result.seconds == pytest.approx(2 * 63 / 64 * 0.1, rel=0.01)


def test_a_ring_of_a_thousand_hosts_takes_under_five_seconds() -> None:
    plan = ring(1000)
    network = SimulatedNetwork(star(1000, 1e9, 1e-5))
    before = time.process_time()
    result = simulate(plan, network, names(1000), 100 * MB)
    assert desktop_seconds(time.process_time() - before) < 5.0
    assert result.method == "symmetry"
    assert result.seconds == pytest.approx(1998 * (1e-5 + 0.1 / 1000))
