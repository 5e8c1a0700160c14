"""Schedules in pieces approach the bounds of uneven networks; plan's simulation measures their times."""

from __future__ import annotations

import pytest

from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode

SIZE, RATE = 100e6, 24e6


def seconds(strategy: str, cables: dict[tuple[str, str], float], places: list[str], options: ScheduleOptions) -> float:
    """Return the time of 100 MB in units of S/B, latencies left out."""
    hosts = tuple(HostNode(name, HostGraph()) for name in dict.fromkeys(places))
    between = tuple(Between(a, b, rate * RATE, 0.0) for (a, b), rate in cables.items())
    world = len(places) - options.helpers
    schedule = catalog.build(strategy, world, options)
    return simulate(schedule, SimulatedNetwork(ClusterGraph(hosts, between)), places, SIZE).seconds * RATE / SIZE


def names(count: int) -> list[str]:
    return [f"host{index}" for index in range(count)]


def star(count: int, slow: float = 1.0) -> dict[tuple[str, str], float]:
    return {(name, "switch"): slow if name == "host3" else 1.0 for name in names(count)}


def test_a_slow_host_sends_its_vector_once_and_receives_the_sum_once() -> None:
    """The slow link's bound is 1, the ring takes 1.5: in pieces, sending and receiving overlap."""
    cables, places = star(4, slow=0.2), names(4)
    whole, cut = (
        seconds("sharded", cables, places, ScheduleOptions(weights=(1, 1, 1, 0), pieces=pieces)) * 0.2
        for pieces in (1, 16)
    )
    assert seconds("ring", cables, places, ScheduleOptions()) * 0.2 == pytest.approx(1.5)
    assert whole == pytest.approx(2.0) and cut == pytest.approx(17 / 16)
    assert seconds("pipelined-chain", cables, places, ScheduleOptions(chunks=64)) * 0.2 < 1.5 / 1.4


@pytest.mark.parametrize("inner", ["ring", "sharded"])
def test_pieces_speed_up_two_racks(inner: str) -> None:
    """The bound of the link between racks is 1; the ring takes 1.5, hierarchical in one piece 1.4."""
    cables = {("host0", "r1"): 2.5, ("host1", "r1"): 2.5, ("host2", "r2"): 2.5, ("host3", "r2"): 2.5, ("r1", "r2"): 1.0}
    groups = ((0, 1), (2, 3))
    times = [
        seconds("hierarchical", cables, names(4), ScheduleOptions(groups=groups, inner=inner, pieces=pieces))
        for pieces in (1, 4, 16)
    ]
    assert seconds("ring", cables, names(4), ScheduleOptions()) == pytest.approx(1.5)
    assert times == pytest.approx([1.4, 1.1, 1.025], rel=2e-3)


def test_hierarchical_sends_each_host_sum_once() -> None:
    """2(n-1)/n of the port for n = 4 hosts, for any number of workers inside; the ring over all takes 1.75."""
    places = [name for name in names(4) for _ in range(2)]
    groups = tuple((2 * host, 2 * host + 1) for host in range(4))
    assert seconds("ring", star(4), places, ScheduleOptions()) == pytest.approx(1.75)
    assert seconds("hierarchical", star(4), places, ScheduleOptions(groups=groups, pieces=4)) == pytest.approx(
        1.5, rel=0.01
    )


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 6), (8, 8)])
def test_helpers_reduce_the_load_as_the_theorem_predicts(n: int, k: int) -> None:
    """t = 2n(n-1)/(n² + kn - 2k), exceeded by one part in `pieces`, because the first piece overlaps with nothing."""
    options = ScheduleOptions(helpers=k, pieces=64)
    theorem = 2 * n * (n - 1) / (n * n + k * n - 2 * k)
    found = seconds("ps", dict.fromkeys(((name, "switch") for name in names(n + k)), 1.0), names(n + k), options)
    assert theorem < found <= theorem * (1 + 1 / 64) * 1.001
