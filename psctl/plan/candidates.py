"""The best prediction of each strategy on given machines, by a search over the options of its schedule.

The search is small. Orders, groups, shares, rings and trees follow from the machines (`rank_orders`); what remains is
the number of pieces of a vector, which the closed forms give approximately. Up to LARGE ranks every candidate is
simulated. With more, closed forms are used on equal cables, and stepwise estimates on unequal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from psctl.message_costs import Costs
from psctl.plan import allreduce_times, rank_orders
from psctl.plan.plan_input import PlanInput
from psctl.plan.simulation.cost_model import costs_on_shared_cores
from psctl.plan.simulation.estimates import LowerBound, lower_bound, stepwise
from psctl.plan.simulation.flow_simulation import simulate, simulate_pipeline
from psctl.plan.simulation.schedule_timing import Timing, at_pace, in_pieces
from psctl.plan.uniform_forms import LARGE, UniformForms
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions, WeightedRing
from psctl.schedule.algorithms.trees import WeightedTree
from psctl.schedule.schedule import Schedule

SMALL = 8
"""Ranks up to which several orders and cuts are tried."""

HUGE = 256
"""Ranks up to which unequal machines are estimated step by step; with more, by the closed forms. Trees are not packed
then: one around each rank would have as many edges as there are pairs of ranks."""

PHASES: Mapping[str, tuple[int, ...]] = {
    "sharded": (1, 16), "hierarchical": (1, 16), "ring": (4,), "bidirectional-ring": (4,), "multi-ring": (4,),
}  # fmt: skip
"""Pieces that are tried where phases may overlap, in addition to those of the rough prediction."""

FINE = 200_000
"""Bytes of a rank's part of a piece where levels overlap: a rank waits for one piece at a time, so with larger pieces
one level delays the other longer. Measured for two racks and 100 MB, relative to the bound: 16 pieces 1.12, 32 1.09, 64
1.02, 128 1.006; 8 MB: 1.00, 1.00, 1.01, 1.14."""

SIMPLER = 1.02
"""Factor by which a later arrangement of ranks must be faster than an earlier one: senders that share one receiver cost
more than their bytes, so levels of rings are preferred."""

FINER = 1.01
"""Factor by which fewer pieces must be faster than more."""

OVERLAPPING = frozenset({"sharded", "hierarchical"})
"""Strategies whose phases load different links, or one link in both directions."""

COARSE = 16
"""Chunks of a rough prediction."""

MESSAGES = 10_000
"""Most transfers of one schedule that a search simulates."""

ESTIMATED_BYTES = 1e9
"""Bytes for which steps are estimated; the time of another size follows from it."""

LEAST = 1024
"""Bytes of a chunk below which cutting saves no time."""

MOST = 256
"""Most chunks of a pipeline."""

PIPELINES = frozenset({"pipelined-chain", "pipelined-tree", "double-tree", "packed-trees"})

TIE = 1.05
"""Predictions that differ by no more than this factor count as equal: they are no more precise."""

ONLY = ScheduleOptions()


class Predicted(msgspec.Struct, frozen=True):
    """A strategy's prediction: its options, time, steps, and the bytes that a rank sends."""

    strategy: str
    options: ScheduleOptions
    timing: Timing
    steps: int
    bytes_per_rank: float

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.timing.seconds


class CandidateSearch:
    """Predicts the strategies that are schedules, and the engine's own all-reduce, on given machines."""

    def __init__(self, inputs: PlanInput) -> None:
        self._inputs = inputs
        self._port = rank_orders.ports(inputs) if inputs.world > 1 else [1.0]
        self._order = rank_orders.order(inputs)
        self._by_number = tuple(range(inputs.world))
        self._forms = UniformForms(inputs, self._port)
        self._uniform = inputs.network.uniform(inputs.ranks)
        self._few = inputs.world <= SMALL
        self._by_form = inputs.world > LARGE and (self._uniform is not None or inputs.world > HUGE)
        self._schedules: dict[tuple[str, ScheduleOptions], Schedule] = {}
        self._bounds: dict[str, list[LowerBound]] = {}
        self._steps: dict[tuple[str, ScheduleOptions], tuple[float, float]] = {}

    def best(self, strategy: str, size: float) -> Predicted:
        """Return a strategy's best prediction: first the arrangement of ranks is chosen, then the number of pieces.
        Near a size that was measured, its options are taken.

        Args:
            strategy: one for which `why_not` returns None; not `ps`.
            size: bytes of the vector.
        """
        measured = self._inputs.pace(strategy).options(size) if strategy != "native" else None
        if measured is not None:
            return self.predict(strategy, msgspec.convert(measured, ScheduleOptions), size)
        found = [self.predict(strategy, options, size) for options in self._options(strategy, size)]
        return self._with_pieces(_first_of(found, SIMPLER), size)

    def _with_pieces(self, rough: Predicted, size: float) -> Predicted:
        arranged = rough.options
        if rough.strategy == "native":
            return rough
        if rough.strategy in PIPELINES:
            cuts = [msgspec.structs.replace(arranged, chunks=cut) for cut in self._chunks(rough.strategy, size)]
        else:
            cuts = [msgspec.structs.replace(arranged, pieces=cut) for cut in self._cuts(rough, size)]
        found = [self.predict(rough.strategy, options, size) for options in cuts if options != arranged]
        if rough.strategy in OVERLAPPING:
            return _first_of(sorted([*found, rough], key=lambda each: -each.options.pieces), FINER)
        return min([rough, *found], key=lambda each: each.seconds)

    @property
    def prunes(self) -> bool:
        """Whether strategies that cannot win are not simulated; beyond LARGE ranks none is."""
        return SMALL < self._inputs.world <= LARGE

    def estimate(self, strategy: str, size: float) -> Predicted:
        """Return a stepwise prediction, for a strategy that cannot win.

        Args:
            strategy: one for which `why_not` returns None; not `ps`.
            size: bytes of the vector.
        """
        found = [self._estimate_by_steps(strategy, options, size) for options in self._options(strategy, size)]
        return min(found, key=lambda each: each.seconds)

    def quick_estimate(self, strategy: str, size: float) -> tuple[float, float]:
        """Return a strategy's seconds, and the part of them in which its messages wait.

        With many ranks they are estimated step by step, once for all sizes. Arguments as of `estimate`.
        """
        if self._few or self._by_form:
            best = self.best(strategy, size)
            return best.seconds, best.timing.waiting
        for options in self._options(strategy, size):
            if (strategy, options) not in self._steps:
                self._estimate_by_steps(strategy, options, ESTIMATED_BYTES)
        known = self.known_estimate(strategy, size)
        assert known is not None
        return known

    def known_estimate(self, strategy: str, size: float) -> tuple[float, float] | None:
        """Return the result of `quick_estimate` where the steps were estimated before, else None."""
        if self._few or self._by_form:
            return None
        found = [self._steps.get((strategy, options)) for options in self._options(strategy, size)]
        if not all(found):
            return None
        factor = self._inputs.pace(strategy).factor(size)
        return min((factor * (one[0] + size * one[1]), factor * one[0]) for one in found if one is not None)

    def _estimate_by_steps(self, strategy: str, options: ScheduleOptions, size: float) -> Predicted:
        schedule = self._schedule(strategy, options)
        costs = costs_on_shared_cores(self._costs(strategy), schedule, self._inputs.ranks_per_core)
        timing = stepwise(schedule, self._inputs.network, self._places(schedule), size, costs)
        sent = max(schedule.sent(size)[: self._inputs.world])
        if size:
            usual = at_pace(timing, self._inputs.pace(strategy).unmeasured, size)
            self._steps[strategy, options] = (usual.waiting, (usual.seconds - usual.waiting) / size)
        return Predicted(strategy, options, self._at_pace(strategy, timing, size), schedule.steps, sent)

    def least_seconds(self, strategy: str, size: float) -> float:
        """Return a lower bound on a strategy's seconds; 0 where a prediction costs no more than the bound.

        Args:
            strategy: one for which `why_not` returns None; not `ps`.
            size: bytes of the vector.
        """
        if self._by_form:
            return 0.0
        if strategy not in self._bounds:
            tried = self._options(strategy, 0.0)
            uncut = dict.fromkeys(msgspec.structs.replace(options, chunks=1, pieces=1) for options in tried)
            self._bounds[strategy] = [self._bound(strategy, options) for options in uncut]
        pace = self._inputs.pace(strategy)
        return min(one.seconds(size, pace) for one in self._bounds[strategy])

    def _bound(self, strategy: str, options: ScheduleOptions) -> LowerBound:
        schedule = self._schedule(strategy, options)
        low = lower_bound(schedule, self._inputs.network, self._places(schedule), self._costs(strategy).alpha)
        # Pieces of a hierarchical schedule flow while others wait.
        return LowerBound(0.0, low.per_byte) if strategy == "hierarchical" else low

    def _schedule(self, strategy: str, options: ScheduleOptions) -> Schedule:
        built_as = _built_as(strategy)
        if options.order == self._by_number:  # as without an order, which may be built already
            options = msgspec.structs.replace(options, order=ONLY.order)
        found = self._schedules.get((built_as, options))
        if found is None:
            found = self._schedules[built_as, options] = catalog.build(built_as, self._inputs.world, options)
        return found

    def _costs(self, strategy: str) -> Costs:
        return self._inputs.costs.get(self._inputs.engine if strategy == "native" else "psctl", Costs())

    def _places(self, schedule: Schedule) -> tuple[str, ...]:
        """Return the place of each node of a schedule; helpers are on the first rank's host."""
        return (*self._inputs.ranks, *(self._inputs.hosts[0] for _ in range(schedule.nodes - self._inputs.world)))

    def predict(self, strategy: str, options: ScheduleOptions, size: float) -> Predicted:
        """Return a strategy's prediction with given options.

        Args:
            strategy: the name of a schedule, or `native`.
            options: of the schedule.
            size: bytes of the vector.
        """
        inputs = self._inputs
        costs = self._costs(strategy)
        if self._by_form:
            form = self._forms.form(_built_as(strategy), options, size, costs)
            return Predicted(strategy, options, self._at_pace(strategy, form.timing(), size), form.steps, form.sent)
        if inputs.world > LARGE:
            return self._estimate_by_steps(strategy, options, size)
        schedule = self._schedule(strategy, options)
        shared = costs_on_shared_cores(costs, schedule, inputs.ranks_per_core)
        timing = self._timing(strategy, options, schedule, size, shared)
        if strategy == "hierarchical" and self._uniform is None:  # its levels load different links
            timing = in_pieces(timing, schedule, options.pieces, costs, inputs.ranks_per_core)
        timing = self._at_pace(strategy, timing, size)
        return Predicted(strategy, options, timing, schedule.steps, max(schedule.sent(size)[: inputs.world]))

    def _timing(self, strategy: str, options: ScheduleOptions, schedule: Schedule, size: float, costs: Costs) -> Timing:
        network, places = self._inputs.network, self._places(schedule)
        if strategy not in PIPELINES:
            return simulate(schedule, network, places, size, costs)

        def cut(chunks: int) -> Schedule:
            return self._schedule(strategy, msgspec.structs.replace(options, chunks=chunks))

        return simulate_pipeline(cut, options.chunks, network, places, size, costs)

    def _at_pace(self, strategy: str, timing: Timing, size: float) -> Timing:
        return at_pace(timing, self._inputs.pace(strategy), size)

    def why_not(self, strategy: str) -> str | None:
        """Return why a strategy is impossible on these machines; None when it is possible."""
        if strategy == "cpu" and self._inputs.nodes > 1:
            return "the ranks are on several hosts, which share no processor"
        if strategy == "packed-trees" and self._inputs.world > HUGE:
            return f"more than {HUGE} ranks: trees are not packed"
        return None

    # -- options

    def _options(self, strategy: str, size: float) -> Iterable[ScheduleOptions]:
        """Return options that differ in the arrangement of the ranks."""
        chunks = self._chunks(strategy, size)[-1] if strategy in PIPELINES else ONLY.chunks
        chunks = min(COARSE, chunks) if self._few else chunks
        match strategy:
            case "native":  # the engine's ring: NCCL's follows the cables, Gloo's the ranks' numbers
                return [ScheduleOptions(order=self._order) if self._inputs.gpus else ONLY]
            case "sharded":
                weights = dict.fromkeys((tuple[int, ...](), rank_orders.shares(self._port)))
                return [
                    ScheduleOptions(weights=each, pieces=self._few_pieces) for each in weights if len(set(each)) != 1
                ]
            case "multi-ring":
                return [ScheduleOptions(rings=self._rings)]
            case "packed-trees":
                return [ScheduleOptions(trees=self._trees, chunks=chunks)]
            case "hierarchical":
                return self._levels
            case "root":
                best = max(range(self._inputs.world), key=lambda rank: (self._port[rank], -rank))
                return [ScheduleOptions(root=root) for root in dict.fromkeys((0, best))]
            case (
                "ring" | "bidirectional-ring" | "chain" | "tree" | "pipelined-chain" | "pipelined-tree" | "double-tree"
            ):
                return [ScheduleOptions(order=each, chunks=chunks) for each in self._orders(strategy)]
            case _:
                return [ONLY]

    def _orders(self, strategy: str) -> Sequence[rank_orders.Order]:
        """Return the orders to try; () is that of the ranks' numbers."""
        found = [() if self._order == self._by_number else self._order]
        if "ring" not in strategy and max(self._port) > 1.05 * min(self._port):
            found.append(rank_orders.slow_last(self._order, self._port))
            if "tree" in strategy:
                first = rank_orders.fastest_first(self._port)
                found += [first, first[::-1]]
        return list(dict.fromkeys(found)) if self._few else found[-1:]

    @property
    def _few_pieces(self) -> int:
        """Pieces of a rough prediction of a strategy with phases; a sharded sum of 32 ranks has 2,000 transfers
        uncut."""
        return 4 if 8 * self._inputs.world**2 <= MESSAGES else 1

    def _cuts(self, rough: Predicted, size: float) -> Sequence[int]:
        """Return the numbers of pieces to try for a strategy with phases."""
        world, strategy = self._inputs.world, rough.strategy
        if not self._few or strategy not in PHASES:
            return ()
        transfers = 2 * world * world * max(1, 2 * len(rough.options.rings))
        most = min(MESSAGES / transfers, size / world / LEAST)
        fine = 1 << max(0, round(math.log2(max(1.0, size / world / FINE))))
        wanted = sorted(
            {*PHASES[strategy], *((fine, fine // 2 or 1) if strategy in OVERLAPPING and self._uniform is None else ())}
        )
        return [cut for cut in wanted if cut <= most or cut == 1]

    def _chunks(self, strategy: str, size: float) -> Sequence[int]:
        """Return the numbers of chunks to try: the best by the closed form of a uniform network, and fewer."""
        named = "double-tree" if strategy == "packed-trees" else strategy
        rates = self._forms.rates(self._inputs.costs.get("psctl", Costs()))
        best = allreduce_times.FORMS[named](self._inputs.world, size, rates).chunks
        most = max(1, min(MOST, int(size / LEAST)))
        if strategy == "packed-trees":
            best = max(1, best // self._inputs.world)
        best = max(1, min(most, best))
        return sorted({max(1, best // 4), max(1, best // 2), best}) if self._few else [best]

    @cached_property
    def _rings(self) -> tuple[WeightedRing, ...]:
        return rank_orders.rings(self._inputs, self._order)

    @cached_property
    def _trees(self) -> tuple[WeightedTree, ...]:
        return rank_orders.trees(self._inputs, self._port)

    @cached_property
    def _levels(self) -> list[ScheduleOptions]:
        return list(self._find_levels())

    def _find_levels(self) -> Iterable[ScheduleOptions]:
        """Yield groups by host, by rack and by level of the machines, and three levels of hosts in racks."""
        inputs, pieces = self._inputs, self._few_pieces
        host, rack = rank_orders.by_host(inputs), rank_orders.by_rack(inputs)
        kinds = [groups for groups in (host, rack, *rank_orders.by_level(inputs)) if 1 < len(groups) < inputs.world]
        for groups in list(dict.fromkeys(kinds)) or [_even(self._order)]:
            inners = ("ring", "sharded") if _alike(groups) else ("sharded", "tree")
            for inner in inners if self._few else inners[:1]:
                yield ScheduleOptions(groups=groups, inner=inner, pieces=pieces)
                if self._few and len(groups) > 2:
                    yield ScheduleOptions(groups=groups, inner=inner, outer="sharded", pieces=pieces)
        if 1 < len(rack) < len(host) < inputs.world:
            place = {rank: at for at, group in enumerate(host) for rank in group}
            across = tuple(tuple(dict.fromkeys(place[rank] for rank in group)) for group in rack)
            yield ScheduleOptions(
                groups=host, inner="ring" if _alike(host) else "sharded", outer="hierarchical", pieces=pieces,
                across=ScheduleOptions(groups=across, inner="ring" if _alike(across) else "sharded"),
            )  # fmt: skip


def _built_as(strategy: str) -> str:
    """Return the schedule by which a strategy is predicted: a ring for the engine's own all-reduce."""
    return "ring" if strategy == "native" else strategy


def _first_of(found: Sequence[Predicted], gain: float) -> Predicted:
    """Return the first that no other beats by more than `gain`."""
    limit = gain * min(each.seconds for each in found)
    return next(each for each in found if each.seconds <= limit)


def _alike(groups: rank_orders.Groups) -> bool:
    """Whether all groups have the same size."""
    return len(set(map(len, groups))) == 1


def _even(order: Sequence[int]) -> rank_orders.Groups:
    """Return an order cut into groups of one size, about as many groups as members; halves for a prime number."""
    world = len(order)
    each = max((part for part in range(1, world) if world % part == 0 and part * part <= world), default=1)
    each = each if each > 1 else (world + 1) // 2
    return tuple(tuple(order[at : at + each]) for at in range(0, world, each))


def options_as_data(options: ScheduleOptions) -> dict[str, object]:
    """Return the options that differ from the defaults, as plain data that `msgspec.convert` reads."""
    usual = msgspec.to_builtins(ONLY)
    found = {key: value for key, value in msgspec.to_builtins(options).items() if value != usual[key]}
    if options.across is not None:
        found["across"] = options_as_data(options.across)
    return found
