"""Waiting, staleness and saving: the recursion and the closed forms against each other and plain simulations."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.plan.capacity import (
    checkpoint_interval,
    checkpoint_overhead,
    clock_times,
    harmonic,
    stable_step,
)
from tests.reference.staleness_bounds import regret_bound, unseen_updates

_compute = st.integers(1, 5).flatmap(
    lambda workers: st.lists(st.lists(st.floats(0.01, 10), min_size=workers, max_size=workers), min_size=1, max_size=12)
)


def exponential(workers: int, clocks: int, seed: int = 1) -> list[list[float]]:
    chance = random.Random(seed)
    return [[chance.expovariate(1.0) for _ in range(workers)] for _ in range(clocks)]


@given(_compute, st.floats(0, 1))
def test_bsp_adds_up_the_slowest_of_each_clock_and_asp_each_workers_own(compute, exchange):
    bsp, asp = clock_times(compute, 0, exchange), clock_times(compute, None, exchange)
    assert bsp.seconds == pytest.approx(sum(max(row) + exchange for row in compute))
    alone = [sum(row[worker] + exchange for row in compute) for worker in range(len(compute[0]))]
    assert asp.ends[-1] == pytest.approx(alone)


@given(_compute, st.integers(0, 6))
def test_nobody_is_more_than_the_staleness_ahead_and_more_staleness_is_never_slower(compute, staleness):
    found = clock_times(compute, staleness)
    for clock, row in enumerate(found.ends):
        for worker, end in enumerate(row):
            begin = end - compute[clock][worker]
            behind = clock - 1 - staleness
            assert behind < 0 or begin >= max(found.ends[behind]) - 1e-9
    assert clock_times(compute, staleness + 1).seconds <= found.seconds + 1e-9
    assert -1e-9 <= found.idle < 1


def test_four_workers_of_exponential_times_take_as_long_as_was_computed_elsewhere():
    """Five runs of 400 clocks from one stream of random numbers: the figures of a reference simulation."""
    chance = random.Random(1)
    found = []
    for staleness in (0, 1, 3, 10, None):
        compute = [[chance.expovariate(1) for _ in range(4)] for _ in range(400)]
        found.append(round(clock_times(compute, staleness).seconds_a_clock, 3))
    assert found == [2.116, 1.511, 1.232, 1.111, 1.037]


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_bsp_with_exponential_times_takes_the_harmonic_number(workers):
    assert clock_times(exponential(workers, 4000), 0).seconds_a_clock == pytest.approx(harmonic(workers), rel=0.05)
    assert harmonic(4) == pytest.approx(25 / 12)


def test_stragglers_that_change_are_hidden_and_one_that_stays_is_not():
    changing = exponential(4, 1000)
    staying = [[1.0, 1.0, 1.0, 3.0]] * 1000
    assert clock_times(changing, 0).idle > 0.5
    assert clock_times(changing, 16).idle < 0.08
    for staleness in (0, 1, 16):
        assert clock_times(staying, staleness).seconds == pytest.approx(3000)
    assert clock_times(staying, None).ends[-1] == [1000, 1000, 1000, 3000]


def error_after(step: float, delay: int, clocks: int = 4000) -> float:
    """The quadratic x^2/2 by gradients that are `delay` clocks late."""
    past = [1.0] * (delay + 1)
    for _ in range(clocks):
        past.append(past[-1] - step * past[-1 - delay])
        if abs(past[-1]) > 1e12:
            break
    return max(abs(each) for each in past[-delay - 1 :])


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (4, 0.3473), (8, 0.18454), (16, 0.09516)])
def test_steps_below_the_limit_converge_and_above_it_diverge(delay, limit):
    assert stable_step(delay) == pytest.approx(limit, abs=5e-5)
    assert error_after(0.97 * stable_step(delay), delay) < 0.1
    assert error_after(1.03 * stable_step(delay), delay) > 10


def test_the_regret_of_stale_sgd_stays_below_the_bound():
    """Losses |x - a_t| on [-1, 1] with every worker as stale as SSP permits: gradients of the clock s+1 before."""
    workers, clocks, chance = 4, 500, random.Random(5)
    for staleness in (0, 3, 10):
        total = workers * clocks
        diameter, gradient = math.sqrt(2), 1.0  # half of (1 - -1) squared is 2
        scale = diameter / (gradient * math.sqrt(2 * (staleness + 1) * workers))
        targets = [chance.choice([-0.5, 0.1, 0.7]) for _ in range(total)]
        best = sorted(targets)[total // 2]
        seen, x, regret = [0.0], 0.0, 0.0
        for clock in range(clocks):
            stale = seen[max(0, clock - staleness)]
            for target in targets[clock * workers : (clock + 1) * workers]:
                regret += abs(stale - target) - abs(best - target)
                count = clock * workers + 1
                x = min(1.0, max(-1.0, x - scale / math.sqrt(count) * math.copysign(1.0, stale - target)))
            seen.append(x)
        assert 0 < regret < regret_bound(staleness, workers, total // workers, gradient, diameter)
    assert unseen_updates(3, 4) == 18


@given(st.floats(0.1, 100), st.floats(1000, 1e7), st.floats(0.2, 5))
def test_no_other_interval_between_checkpoints_costs_less(cost, between, factor):
    best = checkpoint_interval(cost, between)
    assert checkpoint_overhead(cost, best, between) <= checkpoint_overhead(cost, best * factor, between) + 1e-12


def test_an_interval_by_hand():
    assert checkpoint_interval(50, 3600) == 600
