"""Costs of messages, and factors of strategies, fitted to the measured times of a bench, and saved with the cluster."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from psctl.grouping import grouped
from psctl.launch.bench.bench_runs import BenchPlan, BenchResult
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import calibration
from psctl.launch.measure.calibration import FittedCosts, MeasuredSum
from psctl.message_costs import Costs, MeasuredSize, StrategyPace
from psctl.plan.calibrate import fit
from psctl.plan.candidates import CandidateSearch
from psctl.plan.server_placement import place_servers, time_push_pull
from psctl.plan.simulation.schedule_timing import Timing, at_pace
from psctl.schedule.algorithms.catalog import ScheduleOptions

SAMPLES = 40
"""Measurements of one engine that costs are fitted to, at most."""

SEVERAL = 3
"""Measurements that determine the costs of an engine's messages, whichever they are."""

FLOWS = 0.8
"""Share of a prediction above which a measurement shows how fast a strategy's bytes are transferred."""

FLOWING_BYTES = 4_000_000
"""Bytes of a vector above which that is so: buffers of a path take smaller ones faster than its links carry them."""

WAITS = 0.5
"""Share of a prediction above which a measurement shows how long a strategy's messages wait."""

SLOWEST = 8.0
"""The largest factor, and one over the smallest, by which predicted times are corrected."""


def calibrate(reached: ReachedCluster, outlook: BenchPlan, results: Sequence[BenchResult]) -> dict[str, FittedCosts]:
    """Fit what messages cost each engine, and how strategies differ from that, to these results and the saved ones of
    the same machines and ranks; save them with the cluster.

    Returns:
        by engine, what was found; an engine whose costs these measurements do not determine is left as it was.
    """
    ranks = dict(Counter(outlook.inputs.hosts))
    known = [*calibration.sums_of(reached, ranks), *(outlook.sum(each) for each in results if each.valid)]
    sums = [*{(each.strategy, each.bytes): each for each in known}.values()]
    if not sums:
        return {}
    predictor = _Predictor(outlook)
    flowing = {**{name: pace.flowing for name, pace in outlook.inputs.paces.items()}, **predictor.flowing(sums)}
    engine_of = {"native": outlook.inputs.engine, "ps": "ps"}
    engines = grouped((engine_of.get(each.strategy, "psctl"), each) for each in sums)
    enough = {engine: rows for engine, rows in engines.items() if predictor.determine(engine, rows)}
    found = {engine: predictor.fitted(engine, rows, flowing) for engine, rows in enough.items()}
    flowing |= predictor.flowing(sums)
    waiting = {**{name: pace.waiting for name, pace in outlook.inputs.paces.items()}, **predictor.waiting(sums)}
    names = dict.fromkeys([*flowing, *waiting, *(each.strategy for each in sums)])
    paces = {name: StrategyPace(flowing.get(name, 1.0), waiting.get(name, 1.0)) for name in names}
    calibration.save(reached, ranks, sums, found, predictor.measured(sums, paces))
    return found


class _Predictor:
    """Predicts with costs that change.

    Args:
        outlook: the plan that measurements were made for.
    """

    def __init__(self, outlook: BenchPlan) -> None:
        self._outlook = outlook
        self._inputs = copy.copy(outlook.inputs)
        self._inputs.paces = {}
        self._search = CandidateSearch(self._inputs)
        self._servers: dict[int, list[str]] = {}

    def timing(self, row: MeasuredSum) -> Timing:
        """Return what a strategy would take with the options that it was measured with, at the links' own rates."""
        if row.strategy == "ps":
            return time_push_pull(self._inputs, self._serving(row.bytes), row.bytes)[0]
        return self._search.predict(row.strategy, msgspec.convert(row.options, ScheduleOptions), row.bytes).timing

    def determine(self, engine: str, sums: Sequence[MeasuredSum]) -> bool:
        """Whether measurements determine an engine's costs: several do; of an engine with a single strategy, one in
        which messages wait most of the time (of servers `up` has no other)."""
        waits = (timing.waiting >= WAITS * timing.seconds > 0 for timing in map(self.timing, sums))
        return len(sums) >= SEVERAL or (engine != "psctl" and any(waits))

    def fitted(self, engine: str, sums: Sequence[MeasuredSum], flowing: Mapping[str, float]) -> FittedCosts:
        """Fit an engine's costs; later predictions use them."""
        some = _some(sums)

        def predict(index: int, costs: Costs) -> float:
            self._inputs.costs = {**self._inputs.costs, engine: costs}
            row = some[index]
            return at_pace(self.timing(row), StrategyPace(flowing.get(row.strategy, 1.0)), row.bytes).seconds

        fitted = fit([each.seconds for each in some], predict, self._inputs.costs.get(engine))
        self._inputs.costs = {**self._inputs.costs, engine: fitted.costs}
        before = [abs(each.before / each.seconds - 1) for each in some if each.before is not None]
        return FittedCosts(fitted.costs, len(some), statistics.median(before), fitted.after)

    def flowing(self, sums: Sequence[MeasuredSum]) -> dict[str, float]:
        """Return by strategy how many times as long its bytes flowed, from the sizes where that is most of the time."""
        large = [each for each in sums if each.bytes >= FLOWING_BYTES]
        return self._longer(large, FLOWS, lambda timing: timing.flowing)

    def waiting(self, sums: Sequence[MeasuredSum]) -> dict[str, float]:
        """Return by strategy how many times as long its messages waited, from the sizes where that is most of the time;
        costs are fitted to all strategies of an engine together."""
        return self._longer(sums, WAITS, lambda timing: timing.waiting)

    def measured(
        self, sums: Sequence[MeasuredSum], paces: Mapping[str, StrategyPace]
    ) -> dict[str, StrategyPace]:  # fmt: skip
        """Return the paces with the factors by which the times of the measured sizes still differ."""
        found: dict[str, list[MeasuredSize]] = {}
        for each in sorted(sums, key=lambda one: one.bytes):
            expected = at_pace(self.timing(each), paces[each.strategy], each.bytes).seconds
            size = MeasuredSize(each.bytes, _limited(each.seconds / expected), each.options)
            found.setdefault(each.strategy, []).append(size)
        return {
            name: msgspec.structs.replace(pace, measured=tuple(found.get(name, ()))) for name, pace in paces.items()
        }

    def _longer(
        self, sums: Sequence[MeasuredSum], least: float, part: Callable[[Timing], float]
    ) -> dict[str, float]:  # fmt: skip
        found: dict[str, list[float]] = {}
        for each in sums:
            timing = self.timing(each)
            if part(timing) >= least * timing.seconds > 0:
                rest = timing.seconds - part(timing)
                found.setdefault(each.strategy, []).append((each.seconds - rest) / part(timing))
        return {name: _limited(statistics.median(each)) for name, each in found.items()}

    def _serving(self, size: int) -> list[str]:
        if size not in self._servers:
            hosts, order = self._outlook.order.hosts, self._outlook.order
            places = place_servers(self._outlook.inputs, hosts, order.servers, size)
            self._servers[size] = [hosts[at].name for at in places]
        return self._servers[size]


def _limited(factor: float) -> float:
    return min(SLOWEST, max(1 / SLOWEST, factor))


def _some(sums: Sequence[MeasuredSum]) -> list[MeasuredSum]:
    """Return at most SAMPLES of them, spread over sizes and strategies."""
    ordered = sorted(sums, key=lambda each: (each.bytes, each.strategy))
    step = max(1.0, len(ordered) / SAMPLES)
    return [ordered[int(at * step)] for at in range(min(len(ordered), SAMPLES))]


def describe(found: Mapping[str, FittedCosts], world: int) -> list[str]:
    """Return the costs of each engine that were fitted with so many ranks, a line each, for people."""
    return [
        f"{engine}, {world} ranks: {each.costs.alpha * 1e6:.0f} us a message, "
        f"{each.costs.overhead * 1e6:.0f} us of processor at each end, "
        f"{each.costs.gamma * 1e9:.2f} ns a byte summed; predictions were off by {each.before:.0%}, "
        f"now by {each.after:.0%} ({each.measurements} measurements)"
        for engine, each in found.items()
    ]
