"""Estimates of a schedule's time that read each transfer once; a simulation reads every flow at every event.

`stepwise` is the time as if all ranks waited for each other after each step: one message's latency, the bytes on the
most crossed link over its rate, and the sums of the rank that adds most. Schedules whose ranks all do the same take
exactly so long, and others, which wait less, not longer.

`lower_bound` holds for every order of events. All bytes that cross a link must cross it: the fullest link's bytes
over its rate. And a chain of messages, each of which needs a chunk that the one before brought, waits for each of them.
How often a vector is cut changes neither the bytes of a link nor makes the chain of an uncut schedule shorter, so an
uncut schedule represents all its cuts. A search need not time strategies that cannot win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from psctl.message_costs import AS_PREDICTED, Costs, StrategyPace
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import Timing, busiest_link, timing_of
from psctl.schedule.schedule import Schedule

_Step = tuple[tuple[tuple[int, int, str], float], ...]


class LowerBound(msgspec.Struct, frozen=True):
    """Seconds in which messages wait for each other, and seconds that a byte of the vector takes on the fullest
    link."""

    waiting: float
    per_byte: float

    def seconds(self, size: float, pace: StrategyPace = AS_PREDICTED) -> float:
        """Return the bound for `size` bytes, at a strategy's pace."""
        waiting, flowing = self.waiting * min(1.0, pace.waiting), size * self.per_byte * min(1.0, pace.flowing)
        return pace.least * max(waiting, flowing)


def lower_bound(schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], alpha: float) -> LowerBound:
    """Return a lower bound on the time of a schedule.

    Args:
        schedule: the schedule, its vector uncut.
        network: capacities, and routes between places.
        placement: the place of each node.
        alpha: seconds that a message waits besides its route's latency.

    Raises:
        KeyError: a place that is not on the network, or not reachable.
    """
    whole = sum(schedule.shares)
    crossed: dict[tuple[int, ...], int] = {}
    held: dict[tuple[int, int], float] = {}  # (node, chunk) -> seconds that its messages waited
    for _, step in schedule.by_step():
        arrived: dict[tuple[int, int], float] = {}
        added: set[tuple[int, int]] = set()
        for one in step:
            route = network.route(placement[one.source], placement[one.destination])
            crossed[route.links] = crossed.get(route.links, 0) + schedule.shares[one.chunk]
            at = (one.destination, one.chunk)
            waited = held.get((one.source, one.chunk), 0.0) + route.latency + alpha
            arrived[at] = max(arrived.get(at, 0.0), waited)
            if one.action == "reduce":
                added.add(at)
        for at, waited in arrived.items():
            held[at] = max(held.get(at, 0.0), waited) if at in added else waited
    amounts: dict[int, int] = {}
    for links, amount in crossed.items():
        for link in links:
            amounts[link] = amounts.get(link, 0) + amount
    busiest = max((amount / network.capacities[link] for link, amount in amounts.items()), default=0.0)
    return LowerBound(max(held.values(), default=0.0), busiest / whole)


def stepwise(
    schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], size: float, costs: Costs
) -> Timing:
    """Return the time of a schedule, step after step.

    Args:
        schedule: the schedule.
        network: capacities, and routes between places.
        placement: the place of each node.
        size: bytes of the vector.
        costs: of messages, besides their bytes on links.

    Raises:
        KeyError: a place that is not on the network, or not reachable.
    """
    chunk = schedule.chunk_bytes(size)
    total: dict[int, float] = {}
    waiting = flowing = summing = 0.0
    for step, times in _steps_alike(schedule, chunk).items():
        added: dict[int, float] = {}
        crossed: dict[int, float] = {}
        wait = 0.0
        for (source, destination, action), amount in step:
            if action == "reduce":
                added[destination] = added.get(destination, 0.0) + amount
            route = network.route(placement[source], placement[destination])
            wait = max(wait, route.latency)
            for link in route.links:
                crossed[link] = crossed.get(link, 0.0) + amount
        for link, amount in crossed.items():
            total[link] = total.get(link, 0.0) + amount * times
        waiting += times * (wait + costs.alpha)
        flowing += times * max((amount / network.capacities[link] for link, amount in crossed.items()), default=0.0)
        summing += times * costs.gamma * max(added.values(), default=0.0)
    busiest = busiest_link(total, network.capacities, network.names)
    return timing_of("closed form", (waiting, flowing, summing), busiest)


def _steps_alike(schedule: Schedule, chunk: Sequence[float]) -> Mapping[_Step, int]:
    """Return the bytes of each pair and action of a step, and how many steps have just these: most of a ring or a
    pipeline."""
    found: Counter[_Step] = Counter()
    for _, step in schedule.by_step():
        pairs: dict[tuple[int, int, str], float] = {}
        for one in step:
            pair = (one.source, one.destination, one.action)
            pairs[pair] = pairs.get(pair, 0.0) + chunk[one.chunk]
        found[tuple(pairs.items())] += 1
    return found
