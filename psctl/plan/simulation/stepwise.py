"""The time of a schedule of many unlike ranks, as if all waited for each other after each step.

Each step then takes one message's latency, the bytes on its most crossed link over that link's rate, and the sums of
the rank that adds most. Schedules whose ranks do alike take exactly so long, and others, which wait less, not longer.
It takes one look at each transfer, where a simulation would look at every flow whenever one ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import Costs, LinkLoad, Timing
from psctl.schedule.schedule import Schedule


def stepwise(
    schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], size: float, costs: Costs
) -> Timing:
    """Return the time of a schedule, step after step.

    Args:
        schedule: who sends what to whom.
        network: the capacities and ways between places.
        placement: the place of each node.
        size: bytes of the vector.
        costs: what messages cost beside their bytes on links.

    Raises:
        KeyError: a place that the network does not know or can't reach.
    """
    chunk = schedule.chunk_bytes(size)
    total: dict[int, float] = {}
    waiting = flowing = summing = 0.0
    for _, step in schedule.by_step():
        pairs: dict[tuple[int, int], float] = {}
        added: dict[int, float] = {}
        for one in step:
            pair = (one.source, one.destination)
            pairs[pair] = pairs.get(pair, 0.0) + chunk[one.chunk]
            if one.action == "reduce":
                added[one.destination] = added.get(one.destination, 0.0) + chunk[one.chunk]
        crossed: dict[int, float] = {}
        wait = 0.0
        for (source, destination), amount in pairs.items():
            route = network.route(placement[source], placement[destination])
            wait = max(wait, route.latency)
            for link in route.links:
                crossed[link] = crossed.get(link, 0.0) + amount
        for link, amount in crossed.items():
            total[link] = total.get(link, 0.0) + amount
        waiting += wait + costs.alpha
        flowing += max((amount / network.capacities[link] for link, amount in crossed.items()), default=0.0)
        summing += costs.gamma * max(added.values(), default=0.0)
    seconds = waiting + flowing + summing
    loads = sorted(
        (
            LinkLoad(network.names[link], amount, amount / network.capacities[link] / seconds)
            for link, amount in total.items()
        ),
        key=lambda load: -load.utilisation,
    )
    busiest = loads[0].link if loads else "latency"
    name = max((waiting, "latency"), (flowing, busiest), (summing, "sums"))[1]
    alike = sum(1 for load in loads if load.utilisation >= 0.99 * loads[0].utilisation) - 1 if name == busiest else 0
    return Timing(seconds, "closed form", name, max(alike, 0), waiting, flowing, summing, tuple(loads))
