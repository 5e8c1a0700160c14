"""The algorithms of collectives on given machines: predicted times, and the fastest by size.

For the training script's collectives (run.broadcast and others), and for `psctl bench broadcast|...`. Up to LARGE ranks
schedules are simulated, or estimated step by step, on the machines' graph, as those of strategies are; with more,
closed forms of equal links are used. The costs of messages are those of psctl's own data plane.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import msgspec

from psctl.message_costs import Costs
from psctl.plan import allreduce_times, rank_orders
from psctl.plan.allreduce_times import UniformRates
from psctl.plan.candidates import LEAST, MOST, ONLY, CandidateSearch, options_as_data
from psctl.plan.collective_times import collective as closed_form
from psctl.plan.plan_input import PlanInput
from psctl.plan.simulation.cost_model import ADDING, ALPHA, ASSUMED_RATE, ENGINES, costs_on_shared_cores
from psctl.plan.simulation.estimates import stepwise
from psctl.plan.simulation.flow_simulation import simulate, simulate_pipeline
from psctl.plan.simulation.schedule_timing import Timing
from psctl.plan.uniform_forms import LARGE, UniformForms
from psctl.schedule.algorithms import collectives
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.algorithms.collectives import ALGORITHMS, PIPELINES
from psctl.schedule.contracts import Collective
from psctl.schedule.schedule import Schedule

SIZES = (4_096, 65_536, 1_048_576, 16_777_216, 268_435_456)
"""Bytes of a vector for which algorithms are compared."""

SUMS = ("one-shot", "recursive-doubling", "halving-doubling", "sharded", "ring", "packed-trees", "hierarchical")
"""Strategies that are compared for the script's own all-reduce."""

FORMED = ("one-shot", "recursive-doubling", "halving-doubling", "sharded", "ring")
"""Strategies of these with a closed form on equal links."""

MANY = 16
"""Ranks above which the all-to-all that passes chunks on is not simulated: its transfers grow with p^2 lg p."""


class CollectivePrediction(msgspec.Struct, frozen=True):
    """One algorithm of a collective: its options and predicted time; None without a time: why not."""

    algorithm: str
    options: ScheduleOptions
    timing: Timing | None
    why_not: str | None = None

    @property
    def seconds(self) -> float:
        """The predicted time; infinite where there is none."""
        return self.timing.seconds if self.timing is not None else math.inf


class ChosenAlgorithm(msgspec.Struct, frozen=True):
    """The fastest algorithm of a collective for vectors of at most `size` bytes; the last one has no end."""

    size: int
    algorithm: str
    options: ScheduleOptions


class CollectivePlanner:
    """Predicts collectives on given machines."""

    def __init__(self, inputs: PlanInput) -> None:
        self._inputs = inputs
        self._costs = inputs.costs.get("psctl", Costs())
        self._port = rank_orders.ports(inputs) if inputs.world > 1 else [1.0]
        self._forms = UniformForms(inputs, self._port)
        self._search = CandidateSearch(inputs)
        self._schedules: dict[tuple[str, str, ScheduleOptions], Schedule] = {}

    def predictions(self, collective: Collective, size: int) -> list[CollectivePrediction]:
        """Return the prediction of each algorithm, in the order of ALGORITHMS.

        Args:
            collective: no all-reduce, whose predictions are those of strategies.
            size: bytes of the vector: in an all-to-all and where values are gathered, of all ranks' together.
        """
        return [self._best(collective, algorithm, size, simulated=True) for algorithm in ALGORITHMS[collective]]

    def choices(self, collective: Collective) -> list[ChosenAlgorithm]:
        """Return the fastest algorithm by size, smallest sizes first; from estimates, for workers wait for it."""
        best = [self._fastest(collective, size) for size in SIZES]
        found = []
        for (size, one), (after, other) in itertools.pairwise(zip(SIZES, best, strict=True)):
            if one != other:
                found.append(ChosenAlgorithm(round(math.sqrt(size * after)), *one))
        return [*found, ChosenAlgorithm(SIZES[-1], *best[-1])]

    def broadcast_within(self, sums: Schedule, size: int, seconds: float) -> ChosenAlgorithm | None:
        """Return the fastest broadcast of rank 0 whose messages run between ranks that a schedule of sums connects.

        Args:
            sums: the schedule.
            size: bytes.
            seconds: only a broadcast that takes less.
        """
        if self._inputs.world > LARGE:
            return None
        known, found = _pairs(sums), []
        for algorithm in ALGORITHMS["broadcast"]:
            each = self._best("broadcast", algorithm, size, simulated=False)
            made = collectives.build("broadcast", self._inputs.world, algorithm, options=each.options)
            if each.seconds < seconds and _pairs(made) <= known:
                found.append(each)
        best = min(found, key=lambda each: each.seconds, default=None)
        return None if best is None else ChosenAlgorithm(size, best.algorithm, best.options)

    def _fastest(self, collective: Collective, size: int) -> tuple[str, ScheduleOptions]:
        if collective == "all-reduce":
            sums = [self._search.estimate(name, size) for name in SUMS if self._search.why_not(name) is None]
            least = min(sums, key=lambda each: each.seconds)
            return least.strategy, least.options
        found = [self._best(collective, algorithm, size, simulated=False) for algorithm in ALGORITHMS[collective]]
        best = min(found, key=lambda each: each.seconds)
        return best.algorithm, best.options

    def _best(self, collective: Collective, algorithm: str, size: int, *, simulated: bool) -> CollectivePrediction:
        if algorithm == "packed-trees" and self._inputs.world > LARGE:
            return CollectivePrediction(algorithm, ONLY, None, f"more than {LARGE} ranks: trees are not packed")
        found = [
            CollectivePrediction(algorithm, options, self._timing(collective, algorithm, options, size, simulated))
            for options in self._options(algorithm, size, tried=3 if simulated else 1)
        ]
        return min(found, key=lambda each: each.seconds)

    def _options(self, algorithm: str, size: int, tried: int) -> list[ScheduleOptions]:
        """Return options with the best number of chunks of a chain by its closed form; and with fewer and more."""
        if algorithm not in PIPELINES:
            return [ONLY]
        trees = rank_orders.broadcast_trees(self._inputs, self._port) if algorithm == "packed-trees" else ()
        most = max(1, min(MOST // max(1, len(trees)), size // LEAST))
        best = closed_form("broadcast", "pipelined-chain", self._inputs.world, size, self._rates, 0).chunks
        cuts = dict.fromkeys(min(most, max(1, each)) for each in (best, best // 4, 4 * best)[:tried])
        return [ScheduleOptions(chunks=cut, trees=trees) for cut in cuts]

    @property
    def _rates(self) -> UniformRates:
        return self._forms.rates(self._costs)

    def _timing(
        self, collective: Collective, algorithm: str, options: ScheduleOptions, size: int, simulated: bool
    ) -> Timing:
        inputs = self._inputs
        many = MANY if algorithm == "recursive-doubling" and collective == "all-to-all" else LARGE
        if inputs.world > many:
            whole = size / inputs.world if collective == "all-to-all" else size
            return closed_form(collective, algorithm, inputs.world, whole, self._rates, options.chunks).timing()

        def cut(chunks: int) -> Schedule:
            key = collective, algorithm, msgspec.structs.replace(options, chunks=chunks)
            if key not in self._schedules:
                self._schedules[key] = collectives.build(collective, inputs.world, algorithm, options=key[2])
            return self._schedules[key]

        schedule = cut(options.chunks)
        costs = costs_on_shared_cores(self._costs, schedule, inputs.ranks_per_core)
        if not simulated:
            timing = stepwise(schedule, inputs.network, inputs.ranks, size, costs)
            busy = costs.overhead * _messages_after_each_other(schedule)
            return msgspec.structs.replace(timing, seconds=timing.seconds + busy, waiting=timing.waiting + busy)
        if algorithm in PIPELINES:
            return simulate_pipeline(cut, options.chunks, inputs.network, inputs.ranks, size, costs)
        return simulate(schedule, inputs.network, inputs.ranks, size, costs)


def _pairs(schedule: Schedule) -> set[frozenset[int]]:
    """Return the pairs of ranks between which messages run; helpers count as rank 0."""
    real = [*range(schedule.world), *(0 for _ in range(schedule.nodes - schedule.world))]
    return {frozenset((real[one.source], real[one.destination])) for one in schedule.messages()}


def _messages_after_each_other(schedule: Schedule) -> int:
    """Return how many messages the busiest ranks of all steps handle, at either end."""
    counts: dict[int, Counter[int]] = {}
    for one in schedule.messages():
        step = counts.setdefault(one.step, Counter())
        step[one.source] += 1
        step[one.destination] += 1
    return sum(max(step.values()) for step in counts.values())


def usual_choice(collective: Collective, size: int, world: int) -> tuple[str, ScheduleOptions]:
    """Return the algorithm of a collective by the closed forms of equal links at assumed rates, where there is no plan.

    Args:
        collective: its name.
        size: bytes of the vector, as of `predictions`.
        world: number of ranks.
    """
    rates = UniformRates(ALPHA + 2 * ENGINES["psctl"].overhead, 1 / ASSUMED_RATE, ADDING)
    if collective == "all-reduce":
        sums = {name: allreduce_times.FORMS[name](world, size, rates).seconds for name in FORMED}
        return min(sums, key=lambda name: sums[name]), ONLY
    whole = size / world if collective == "all-to-all" else size
    forms = {
        name: closed_form(collective, name, world, whole, rates, 0)
        for name in ALGORITHMS[collective]
        if name != "packed-trees"
    }
    best = min(forms, key=lambda name: forms[name].seconds)
    most = max(1, min(MOST, size // LEAST))
    return best, ScheduleOptions(chunks=min(most, forms[best].chunks)) if best in PIPELINES else ONLY


def choices_as_data(inputs: PlanInput) -> list[tuple[str, int, str, dict[str, object]]]:
    """Return the choices of all collectives: collective, size, algorithm, and options as plain data."""
    planner = CollectivePlanner(inputs)
    names: list[Collective] = ["all-reduce", *ALGORITHMS]
    return [
        (name, each.size, each.algorithm, options_as_data(each.options))
        for name in names
        for each in planner.choices(name)
    ]
