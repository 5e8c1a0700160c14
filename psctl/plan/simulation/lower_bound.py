"""What a schedule takes at least, told by one look at each transfer: a search need not time what can't win.

Two things hold whatever the order of events. All bytes that cross a link must cross it: the fullest link's bytes over
its rate. And a chain of messages, each of which carries on a chunk that the one before brought, waits for each of them.
How often a vector is cut changes neither the bytes of a link nor makes the chain of an uncut one shorter, so an uncut
schedule stands for all its cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import AS_PREDICTED, StrategyPace
from psctl.schedule.schedule import Schedule


class LowerBound(msgspec.Struct, frozen=True):
    """Seconds that messages wait for each other, and seconds that a byte of the vector takes on the fullest link."""

    waiting: float
    per_byte: float

    def seconds(self, size: float, pace: StrategyPace = AS_PREDICTED) -> float:
        """Return what `size` bytes take at least, at a strategy's own pace."""
        return max(self.waiting * min(1.0, pace.waiting), size * self.per_byte * min(1.0, pace.flowing))


def lower_bound(schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], alpha: float) -> LowerBound:
    """Return what a schedule takes at least.

    Args:
        schedule: who sends what to whom, its vector uncut.
        network: the capacities and ways between places.
        placement: the place of each node.
        alpha: seconds a message waits beside its way's latency.

    Raises:
        KeyError: a place that the network does not know or can't reach.
    """
    whole = sum(schedule.shares)
    crossed: dict[tuple[int, ...], int] = {}
    held: dict[tuple[int, int], float] = {}  # (node, chunk) -> seconds that its messages waited
    for _, step in schedule.by_step():
        came: dict[tuple[int, int], float] = {}
        added: set[tuple[int, int]] = set()
        for one in step:
            route = network.route(placement[one.source], placement[one.destination])
            crossed[route.links] = crossed.get(route.links, 0) + schedule.shares[one.chunk]
            at = (one.destination, one.chunk)
            waited = held.get((one.source, one.chunk), 0.0) + route.latency + alpha
            came[at] = max(came.get(at, 0.0), waited)
            if one.action == "reduce":
                added.add(at)
        for at, waited in came.items():
            held[at] = max(held.get(at, 0.0), waited) if at in added else waited
    amounts: dict[int, int] = {}
    for links, amount in crossed.items():
        for link in links:
            amounts[link] = amounts.get(link, 0) + amount
    busiest = max((amount / network.capacities[link] for link, amount in amounts.items()), default=0.0)
    return LowerBound(max(held.values(), default=0.0), busiest / whole)
