"""One rank simulated for all: the time of schedules in which every rank does the same at every step.

On hosts with equal cables on one switch, let in each step every rank send m messages of b bytes and receive m. If all
messages of a step start together, each link carries m equal flows, so all of them end together after m b / B; and if
every message of the next step waits for one of this step, they all start together again. Both are checked, so the
time is exactly that of the simulation: the sum over the steps of latency + m b / B + m b gamma where they are summed.
A ring of a thousand hosts takes the time of reading its transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psctl.message_costs import Costs
from psctl.plan.simulation.routes import NetworkRoute, SimulatedNetwork
from psctl.plan.simulation.schedule_timing import BusiestLink, Timing, timing_of
from psctl.schedule.schedule import Schedule, Transfer

_LANES = 1 << 20
"""More than any schedule has."""


def lockstep(
    schedule: Schedule, network: SimulatedNetwork, route: NetworkRoute, size: float, costs: Costs
) -> Timing | None:
    """Return the time of a schedule on equal links, or None where the ranks' steps differ.

    `route` is that between any two nodes.
    """
    if costs.overhead or schedule.world != schedule.nodes or len(set(schedule.shares)) > 1:
        return None
    capacity = min((network.capacities[link] for link in route.links), default=float("inf"))
    check = _SymmetryCheck(schedule.nodes, len(schedule.shares), costs.gamma > 0)
    chunk = size / len(schedule.shares)
    now = moved = waiting = flowing = summing = 0.0
    for number, step in schedule.by_step():
        if not check.same(number, step):
            return None
        amount = chunk * len(step) / schedule.nodes
        wait, flow = route.latency + costs.alpha, amount / capacity
        add = amount * costs.gamma if step[0].action == "reduce" else 0.0
        waiting, flowing, summing = waiting + wait, flowing + flow, summing + add
        now, moved = now + wait + flow + add, moved + amount
    busiest = BusiestLink(network.names[route.links[0]], moved / capacity, 2 * schedule.nodes - 1)
    return timing_of("symmetry", (waiting, flowing, summing), busiest, now)


class _SymmetryCheck:
    """Whether each step is the same for all ranks, and follows the one before for all of them.

    It reads millions of transfers, so a message is a whole number made of its ends and lane.
    """

    def __init__(self, nodes: int, chunks: int, adding: bool) -> None:
        self._nodes = nodes
        self._chunks = chunks
        self._adding = adding
        self._step = -1  # the step before, -1 at the beginning
        self._arrived = [-1] * (nodes * chunks)  # node and chunk -> the last step in which some of it arrived
        self._lanes: set[int] = set()  # sender and lane of the step before
        self._summed = False

    def same(self, number: int, step: Sequence[Transfer]) -> bool:
        """Return whether this step keeps the symmetry, and add it."""
        nodes, chunks, before, arrived, action = self._nodes, self._chunks, self._step, self._arrived, step[0].action
        sizes: dict[int, int] = {}
        following: set[int] = set()
        for one in step:
            source, chunk = one.source, one.chunk
            key = (source * nodes + one.destination) * _LANES + one.lane
            sizes[key] = sizes.get(key, 0) + 1
            if arrived[source * chunks + chunk] == before:
                following.add(key)
            if one.action != action:
                return False
        if before >= 0 and len(following) < len(sizes) and not self._by_lane(sizes.keys() - following):
            return False
        each, rest = divmod(len(sizes), nodes)
        if rest or len(set(sizes.values())) > 1 or not self._even(sizes, each):
            return False
        adds = self._adding and action == "reduce"
        if adds and each > 1 and not _one_sum(step):
            return False
        for one in step:
            arrived[one.destination * chunks + one.chunk] = number
        self._step, self._summed = number, adds
        self._lanes = {key // (nodes * _LANES) * _LANES + key % _LANES for key in sizes}
        return True

    def _by_lane(self, keys: Iterable[int]) -> bool:
        """Whether the senders of these messages were busy on their lanes until the end of the step before."""
        whole = self._nodes * _LANES
        return not self._summed and all(key // whole * _LANES + key % _LANES in self._lanes for key in keys)

    def _even(self, keys: Iterable[int], each: int) -> bool:
        out, into = [0] * self._nodes, [0] * self._nodes
        for key in keys:
            out[key // _LANES // self._nodes] += 1
            into[key // _LANES % self._nodes] += 1
        return max(out) == max(into) == each


def _one_sum(step: Sequence[Transfer]) -> bool:
    """Whether each rank adds all that it receives in a step to the same chunks."""
    into: dict[int, dict[int, set[int]]] = {}
    for one in step:
        into.setdefault(one.destination, {}).setdefault(one.source, set()).add(one.chunk)
    return all(len({frozenset(chunks) for chunks in sources.values()}) == 1 for sources in into.values())
