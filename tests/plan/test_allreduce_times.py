"""On equal hosts the simulation of every schedule gives the textbook's time; the forms give the textbook's facts."""

from __future__ import annotations

import math
import time

import pytest

from psctl.message_costs import Costs
from psctl.plan.allreduce_times import (
    FORMS,
    MOST_CHUNKS,
    UniformRates,
    best_chunks,
    double_tree,
    halving_doubling,
    hierarchical,
    ring,
    root,
)
from psctl.plan.collective_times import collective, pipeline
from psctl.plan.simulation.flow_simulation import simulate, simulate_pipeline
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import Timing
from psctl.schedule.algorithms import catalog, collectives
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.algorithms.parameter_server import balanced_shares, parameter_server
from psctl.schedule.schedule import Schedule
from tests.desktop_time import desktop_seconds
from tests.reference import barriers
from tests.reference.crossovers import ring_beats_double_tree, ring_beats_halving_doubling
from tests.reference.networks import star
from tests.reference.server_times import push_then_pull, split

ALPHA, BANDWIDTH, GAMMA = 2e-5, 1e9, 1e-10
PIPELINES = ("pipelined-chain", "pipelined-tree", "double-tree")
PHASED = tuple(name for name in FORMS if name not in PIPELINES)


def on_star(plan: Schedule, size: float, gamma: float = 0.0, bandwidth: float = BANDWIDTH) -> Timing:
    places = [f"node{index}" for index in range(plan.nodes)]
    return simulate(plan, SimulatedNetwork(star(plan.nodes, bandwidth, ALPHA)), places, size, Costs(gamma=gamma))


def rates(gamma: float = 0.0) -> UniformRates:
    return UniformRates(ALPHA, 1 / BANDWIDTH, gamma)


@pytest.mark.parametrize("strategy", PHASED)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 13, 16])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e8])
def test_simulation_is_the_form(strategy: str, world: int, size: float) -> None:
    form = FORMS[strategy](world, size, rates())
    plan = catalog.build(strategy, world)
    assert on_star(plan, size).seconds == pytest.approx(form.seconds, rel=0.01)
    assert plan.steps == form.steps
    assert max(plan.sent(size)) == pytest.approx(form.sent) or strategy in ("chain", "tree", "cpu"), "bytes a rank"


@pytest.mark.parametrize("strategy", [name for name in PHASED if name != "bidirectional-ring"])
@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_sums_cost_what_the_formula_gives(strategy: str, world: int) -> None:
    form = FORMS[strategy](world, 1e7, rates(GAMMA))
    assert on_star(catalog.build(strategy, world), 1e7, GAMMA).seconds == pytest.approx(form.seconds, rel=0.01)


@pytest.mark.parametrize("strategy", PIPELINES)
@pytest.mark.parametrize("world", [8, 16])
def test_long_pipelines_are_within_a_hundredth_of_the_form(strategy: str, world: int) -> None:
    form = FORMS[strategy](world, 1e8, rates())
    assert 20 < form.chunks < MOST_CHUNKS
    plan = catalog.build(strategy, world, ScheduleOptions(chunks=form.chunks))
    assert on_star(plan, 1e8).seconds == pytest.approx(form.seconds, rel=0.01)


@pytest.mark.parametrize("strategy", PIPELINES)
@pytest.mark.parametrize("world", [4, 5, 7, 13])
@pytest.mark.parametrize("size", [1e5, 1e6])
def test_short_pipelines_are_near_it(strategy: str, world: int, size: float) -> None:
    form = FORMS[strategy](world, size, rates())
    plan = catalog.build(strategy, world, ScheduleOptions(chunks=form.chunks))
    assert on_star(plan, size).seconds == pytest.approx(form.seconds, rel=0.25)


@pytest.mark.parametrize("strategy", PIPELINES)
def test_the_best_number_of_chunks_is_best_where_it_is_simulated(strategy: str) -> None:
    best = FORMS[strategy](8, 1e7, rates()).chunks

    def seconds(chunks: int) -> float:
        return on_star(catalog.build(strategy, 8, ScheduleOptions(chunks=chunks)), 1e7).seconds

    assert seconds(best) <= 1.01 * min(seconds(max(1, best // 2)), seconds(best * 2))


FORMED = [
    (name, one) for name, known in collectives.ALGORITHMS.items() for one in known if one != "packed-trees"
]  # fmt: skip


@pytest.mark.parametrize(("name", "algorithm"), FORMED, ids=[f"{name}: {one}" for name, one in FORMED])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_other_collectives_are_theirs(name: str, algorithm: str, world: int) -> None:
    chunks = 4 if algorithm in collectives.PIPELINES else 1
    plan = collectives.build(name, world, algorithm, options=ScheduleOptions(chunks=chunks))  # type: ignore[arg-type]
    form = collective(name, algorithm, world, 1e6, rates(), chunks)
    found = on_star(plan, 1e6 * world if name == "all-to-all" else 1e6)
    uneven = algorithm == "pipelined-tree" and world != 2  # the last level is not full
    assert found.seconds == pytest.approx(form.seconds, rel=0.25 if uneven else 0.01)


@pytest.mark.parametrize(("name", "steps"), [("dissemination", 3), ("token-ring", 16), ("root", 2), ("all-to-all", 1)])
def test_a_barrier_waits_for_its_steps(name: str, steps: int) -> None:
    assert on_star(barriers.build(name, 8), 0.0).seconds == pytest.approx(steps * ALPHA, rel=0.01)


@pytest.mark.parametrize(("workers", "count"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_servers_of_their_own_are_theirs(workers: int, count: int) -> None:
    plan = catalog.build("ps", workers, ScheduleOptions(servers=tuple(range(workers, workers + count))))
    assert on_star(plan, 1e8, GAMMA).seconds == pytest.approx(
        push_then_pull(workers, count, 1e8, rates(GAMMA)), rel=0.01
    )


@pytest.mark.parametrize("spare", [0, 1, 2, 4, 8])
def test_the_split_over_spare_machines_reaches_its_bound_in_many_pieces(spare: int) -> None:
    nodes, shares = balanced_shares(8, spare)
    network = SimulatedNetwork(star(8 + spare, BANDWIDTH, 0.0))
    places = [f"node{index}" for index in range(8 + spare)]
    found = simulate_pipeline(lambda pieces: parameter_server(8, nodes, shares, pieces), 64, network, places, 1e8)
    assert found.seconds == pytest.approx(split(8, spare, 1e8, BANDWIDTH).seconds, rel=0.03)


# -- what the forms say


def test_steps_of_the_textbook() -> None:
    assert [ring(world, 1.0, rates()).steps for world in (2, 4, 5, 8, 16)] == [2, 6, 8, 14, 30]
    assert [halving_doubling(world, 1.0, rates()).steps for world in (2, 4, 8, 16)] == [2, 4, 6, 8]
    assert halving_doubling(6, 1.0, rates()).steps == 2 * 2 + 2


def test_one_rank_takes_no_time() -> None:
    for form in [make(1, 1e6, rates(GAMMA)) for make in FORMS.values() if make is not FORMS["cpu"]]:
        assert form.flowing + form.summing == 0.0


def test_halving_doubling_is_never_slower_than_a_ring_for_powers_of_two() -> None:
    for world in (2, 4, 8, 64):
        assert ring_beats_halving_doubling(world, rates()) == math.inf
        assert halving_doubling(world, 1e9, rates()).seconds <= ring(world, 1e9, rates()).seconds + 1e-12


@pytest.mark.parametrize("world", [6, 12, 24])
def test_a_ring_beats_halving_doubling_above_the_crossover(world: int) -> None:
    at = ring_beats_halving_doubling(world, rates())
    for size, faster in ((0.9 * at, False), (1.1 * at, True)):
        assert (ring(world, size, rates()).seconds < halving_doubling(world, size, rates()).seconds) is faster


def test_crossover_of_ring_and_double_tree() -> None:
    assert ring_beats_double_tree(8, rates()) == pytest.approx(ALPHA * BANDWIDTH * 8 * 4)
    at = ring_beats_double_tree(64, rates())
    small, large = 0.02 * at, 20 * at  # what fills the trees moves the crossover down
    assert double_tree(64, small, rates()).seconds < ring(64, small, rates()).seconds
    assert double_tree(64, large, rates()).seconds > ring(64, large, rates()).seconds


def test_rings_over_several_cables_divide_what_flows_and_not_what_waits() -> None:
    one, three = ring(8, 1e6, rates(GAMMA)), ring(8, 1e6, rates(GAMMA), cables=3)
    assert three.flowing == pytest.approx(one.flowing / 3)
    assert (three.waiting, three.summing) == (one.waiting, one.summing)


def test_bytes_between_groups_do_not_grow_with_the_group() -> None:
    slow = UniformRates(1e-4, 1e-8)
    whole = [each * hierarchical(4, each, 1e8, UniformRates(0.0, 0.0), slow).sent for each in (1, 2, 8)]
    inside = [each * ring(each, 1e8, rates()).sent for each in (1, 2, 8)]
    assert [all_bytes - own for all_bytes, own in zip(whole, inside, strict=True)] == pytest.approx([1.5e8] * 3)


def test_hierarchical_is_simulated_as_its_form() -> None:
    groups = tuple(tuple(range(first, first + 4)) for first in (0, 4, 8))
    plan = catalog.build("hierarchical", 12, ScheduleOptions(groups=groups))
    assert on_star(plan, 1e8).seconds == pytest.approx(hierarchical(3, 4, 1e8, rates(), rates()).seconds, rel=0.01)


def test_chunks_of_a_pipeline() -> None:
    best = math.sqrt(6 * 1e8 / BANDWIDTH / ALPHA)
    assert best_chunks(6, 1e8, rates()) in (int(best), int(best) + 1)
    assert best_chunks(6, 0.0, rates()) == best_chunks(0, 1e8, rates()) == 1
    assert best_chunks(6, 1e8, UniformRates(0.0, 1e-9)) == MOST_CHUNKS
    found, bound = pipeline(7, 1e8, rates()), (math.sqrt(6 * ALPHA) + math.sqrt(0.1)) ** 2
    assert found.seconds == pytest.approx(bound, rel=0.001)


def test_root_grows_with_the_world_and_the_ring_does_not() -> None:
    assert root(16, 1e8, rates()).flowing == pytest.approx(15 * root(2, 1e8, rates()).flowing)
    assert ring(16, 1e8, rates()).flowing < 2 * ring(2, 1e8, rates()).flowing


# -- large worlds


def test_a_thousand_hosts_take_under_five_seconds() -> None:
    before = time.process_time()
    found = [make(1000, 1e8, rates(GAMMA)).timing() for make in FORMS.values()]
    assert desktop_seconds(time.process_time() - before) < 5.0
    assert {each.method for each in found} == {"closed form"}
    assert all(math.isfinite(each.seconds) and each.seconds > 0 for each in found)


@pytest.mark.parametrize("strategy", ["double-tree", "pipelined-tree", "pipelined-chain"])
def test_long_pipelines_of_sixty_four_ranks_are_predicted_from_short_ones(strategy: str) -> None:
    form = FORMS[strategy](64, 1e8, rates())
    network, places = SimulatedNetwork(star(64, BANDWIDTH, ALPHA)), [f"node{index}" for index in range(64)]
    built: list[int] = []  # numbers of chunks: they set the time of a simulation

    def build(chunks: int) -> Schedule:
        built.append(chunks)
        return catalog.build(strategy, 64, ScheduleOptions(chunks=chunks))

    found = simulate_pipeline(build, form.chunks, network, places, 1e8)
    assert form.chunks > 100 and max(built) < 25
    assert found.seconds == pytest.approx(form.seconds, rel=0.02)


def test_two_short_pipelines_predict_a_long_one() -> None:
    network, places = SimulatedNetwork(star(16, BANDWIDTH, ALPHA)), [f"node{index}" for index in range(16)]

    def build(chunks: int) -> Schedule:
        return catalog.build("double-tree", 16, ScheduleOptions(chunks=chunks))

    long = simulate(build(150), network, places, 1e8, Costs(gamma=GAMMA))
    short = simulate_pipeline(build, 150, network, places, 1e8, Costs(gamma=GAMMA))
    assert short.seconds == pytest.approx(long.seconds, rel=0.01)
    assert short.busiest == pytest.approx(long.busiest)
    assert (short.waiting, short.flowing) == pytest.approx((long.waiting, long.flowing), rel=0.02)


@pytest.mark.parametrize("world", [4, 5, 8])
@pytest.mark.parametrize("gamma", [0.0, 1e-9])
def test_one_rank_stands_for_all_only_where_the_time_is_the_same(world: int, gamma: float) -> None:
    plans = [catalog.build(name, world) for name in FORMS]
    plans.append(catalog.build("ps", world, ScheduleOptions(servers=tuple(range(world)), pieces=3)))
    plans.append(catalog.build("sharded", world, ScheduleOptions(pieces=3)))
    plans.append(catalog.build("sharded", world, ScheduleOptions(paced=True)))
    plans.append(catalog.build("ring", world, ScheduleOptions(pieces=2)))
    plans += [collectives.build(name, world, one) for name, known in collectives.ALGORITHMS.items() for one in known]
    plans += [barriers.build(name, world) for name in barriers.NAMES]
    used = 0
    for plan in plans:
        places = [f"node{index}" for index in range(plan.nodes)]
        network, costs = SimulatedNetwork(star(plan.nodes, BANDWIDTH, ALPHA)), Costs(gamma=gamma)
        short = simulate(plan, network, places, 1e6, costs)
        long = simulate(plan, network, places, 1e6, costs, method="simulated")
        assert short.seconds == pytest.approx(long.seconds, rel=1e-6), f"{plan.collective} {plan.name}"
        used += short.method == "symmetry"
    assert used >= 10
