"""One rank that stands for all: the time of schedules in which every rank does the same at every step.

On hosts with equal cables on one switch, let in each step every rank send m messages of b bytes and receive m. If all
messages of a step start together, each link carries m equal flows, so all of them end together after m b / B; and if
every message of the next step waits for one of this step, they all start together again. Both are checked, so the
time is exactly that of the simulation: the sum over the steps of latency + m b / B + m b gamma where they are summed.
A ring of a thousand hosts is done so in the time it takes to read it.
"""

from __future__ import annotations

from psctl.plan.routes import Network, Route
from psctl.plan.timing import Costs, Leg, Load, Timing
from psctl.plan.waiting import Message, messages
from psctl.schedule.transfer import Schedule


def lockstep(schedule: Schedule, network: Network, route: Route, size: float, costs: Costs) -> Timing | None:
    """Return the time of a schedule on equal links, or None where ranks differ in what they do.

    `route` is the way between any two nodes.
    """
    if costs.switch or costs.overhead or schedule.world != schedule.nodes or len(set(schedule.shares)) > 1:
        return None
    capacity = min((network.capacities[link] for link in route.links), default=float("inf"))
    now, moved, legs = 0.0, 0.0, []
    waiting = flowing = summing = 0.0
    walk = _Walk(schedule.nodes, costs.gamma > 0)
    sent = messages(schedule, size)
    start = 0
    for stop in range(1, len(sent) + 1):
        if stop < len(sent) and sent[stop].step == sent[start].step:
            continue
        step = sent[start:stop]
        start = stop
        if not walk.same(step):
            return None
        first = step[0]
        amount = first.bytes * (len(step) // schedule.nodes)
        wait, flow = route.latency + costs.alpha, amount / capacity
        add = amount * costs.gamma if first.reduces else 0.0
        legs.append(
            Leg(first.step, first.source, first.destination, first.chunks[0], now, now + wait, now + wait + flow,
                now + wait + flow + add)
        )  # fmt: skip
        waiting, flowing, summing = waiting + wait, flowing + flow, summing + add
        now, moved = now + wait + flow + add, moved + amount
    load = Load(network.names[route.links[0]], moved, moved / capacity / now if now else 0.0)
    name = max((waiting, "latency"), (flowing, load.link), (summing, "sums"))[1]
    alike = 2 * schedule.nodes - 1 if name == load.link else 0
    return Timing(now, "symmetry", name, alike, waiting, flowing, summing, (load,), tuple(legs))


class _Walk:
    """Whether each step is the same for all ranks, and follows the one before for all of them."""

    def __init__(self, nodes: int, adding: bool) -> None:
        self._nodes = nodes
        self._adding = adding
        self._step = -1  # the step before, -1 at the beginning
        self._came: dict[tuple[int, int], int] = {}  # (node, chunk) -> the last step that brought some of it
        self._lanes: dict[tuple[int, int], int] = {}  # (sender, lane) -> the last step that used it
        self._summed = False

    def same(self, step: list[Message]) -> bool:
        """Return whether this step keeps the symmetry, and take it."""
        each, rest = divmod(len(step), self._nodes)
        first = step[0]
        if rest or any(one.reduces != first.reduces or len(one.chunks) != len(first.chunks) for one in step):
            return False
        out, into = [0] * self._nodes, [0] * self._nodes
        for one in step:
            out[one.source] += 1
            into[one.destination] += 1
        if max(out) > each or max(into) > each or not all(self._follows(one) for one in step):
            return False
        if self._adding and first.reduces and each > 1 and not _one_sum(step):
            return False
        for one in step:
            self._lanes[one.source, one.lane] = first.step
            for chunk in one.chunks:
                self._came[one.destination, chunk] = first.step
        self._step, self._summed = first.step, self._adding and first.reduces
        return True

    def _follows(self, one: Message) -> bool:
        before = self._step
        if before < 0 or any(self._came.get((one.source, chunk)) == before for chunk in one.chunks):
            return True
        return not self._summed and self._lanes.get((one.source, one.lane)) == before


def _one_sum(step: list[Message]) -> bool:
    """Whether each rank adds all that comes to it in a step to one and the same chunk."""
    into: dict[int, list[int]] = {}
    return all(into.setdefault(one.destination, one.chunks) == one.chunks for one in step)
