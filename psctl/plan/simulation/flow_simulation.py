"""The time of a schedule on a network, by a simulation of its messages as flows.

A message waits for its dependencies (`message_dependencies`), then for its latency, then flows at its max-min fair rate
over all links of its route (`flow_rates`), then is reduced at its receiver, one message after another. Steps are no
barriers. Rates change only when a flow starts or ends; events at the same time are handled together, so that a
symmetric schedule of thousands of messages needs one computation of rates a step.

Long pipelines are predicted from two short ones: once a pipeline is full, every further chunk takes as long as the one
before, so with chunks of one size the time is linear in their number. 64 ranks and 500 chunks would be 120,000
messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from psctl.message_costs import Costs
from psctl.plan.simulation.flow_rates import NEAR, ActiveFlows
from psctl.plan.simulation.message_dependencies import MessageDependencies
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import Timing, busiest_link, timing_of
from psctl.plan.simulation.symmetry import lockstep
from psctl.schedule.schedule import Schedule

FREE = Costs()
"""No costs besides the bytes on links."""

FEW, ENOUGH = 12, 24
"""Chunks of the two simulations: chains and trees of 16 to 64 ranks are within 1% of the long simulation; with fewer a
double tree is 3% off."""

MESSAGES = 4000
"""Transfers up to which a pipeline is simulated whole."""

_FLOW, _DONE = 0, 1
_NEVER = float("inf")


def simulate(
    schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], size: float, costs: Costs = FREE,
    method: Literal["auto", "simulated"] = "auto",
) -> Timing:  # fmt: skip
    """Return the time of a schedule.

    Args:
        schedule: the schedule.
        network: capacities, and routes between places.
        placement: the place of each node of the schedule, helpers after the ranks.
        size: bytes of the vector.
        costs: of messages, besides their bytes on links.
        method: `auto` simulates one rank for all where every rank does the same on equal links.

    Returns:
        the timing; its `method` says whether one rank was simulated for all.

    Raises:
        KeyError: a place that is not on the network, or not reachable.
    """
    assert len(placement) == schedule.nodes, f"{schedule.nodes} nodes need as many places, not {len(placement)}"
    route = network.uniform(placement) if method == "auto" else None
    if route is not None:
        found = lockstep(schedule, network, route, size, costs)
        if found is not None:
            return found
    return _Run(schedule, network, placement, size, costs).timing()


def simulate_pipeline(
    build: Callable[[int], Schedule], chunks: int, network: SimulatedNetwork, placement: Sequence[str], size: float,
    costs: Costs = FREE,
) -> Timing:  # fmt: skip
    """Return the time of a pipeline.

    Args:
        build: returns the schedule for a number of chunks.
        chunks: number of chunks.
        network: capacities, and routes between places.
        placement: the place of each node.
        size: bytes of the whole vector.
        costs: of messages, besides their bytes.

    Returns:
        the timing.

    Raises:
        KeyError: a place that is not on the network, or not reachable.
    """
    short = build(min(chunks, ENOUGH))
    if chunks <= ENOUGH or len(short.transfers) * chunks <= MESSAGES * ENOUGH:
        return simulate(build(chunks), network, placement, size, costs)
    piece = size / chunks
    one = simulate(build(FEW), network, placement, piece * FEW, costs)
    two = simulate(short, network, placement, piece * ENOUGH, costs)
    further = (chunks - ENOUGH) / (ENOUGH - FEW)

    def longer(few: float, enough: float) -> float:
        return enough + further * (enough - few)

    return msgspec.structs.replace(
        two, seconds=longer(one.seconds, two.seconds), waiting=longer(one.waiting, two.waiting),
        flowing=longer(one.flowing, two.flowing), summing=longer(one.summing, two.summing),
        busiest=two.busiest * chunks / ENOUGH,
    )  # fmt: skip


class _Run:
    """One simulation."""

    def __init__(
        self, schedule: Schedule, network: SimulatedNetwork, placement: Sequence[str], size: float, costs: Costs
    ) -> None:  # fmt: skip
        self._sent = sent = schedule.messages()
        chunk = schedule.chunk_bytes(size)
        self._bytes = [sum([chunk[each] for each in message.chunks]) for message in sent]
        self._network = network
        self._costs = costs
        self._dependencies = MessageDependencies(sent)
        self._routes = [network.route(placement[each.source], placement[each.destination]) for each in sent]
        self._due: list[tuple[float, int, int]] = []  # (time, message, _FLOW or _DONE)
        self._flows = ActiveFlows(network.capacities)
        self._busy: dict[int, float] = {}  # node -> when its processor is free
        count = len(self._dependencies.need)
        self._why = [-1] * count
        self._ready, self._flowing = [0.0] * count, [0.0] * count
        self._arrived, self._ended = [0.0] * count, [0.0] * count

    def timing(self) -> Timing:
        for index, need in enumerate(list(self._dependencies.need)):
            if need == 0:
                self._start(index, 0.0)
        while (now := min(self._flows.next_end(), self._due[0][0] if self._due else _NEVER)) < _NEVER:
            self._handle_events(now)
            self._flows.update_rates(now)
        return self._report()

    def _handle_events(self, now: float) -> None:
        """Handle all events of this moment; lane by lane, so that equal nodes stay equal."""
        for index in sorted(self._flows.remove_ended(now), key=lambda index: (self._sent[index].lane, index)):
            self._deliver(index, now)
        bound = now * (1 + NEAR)
        while self._due and self._due[0][0] <= bound:
            _, index, what = heapq.heappop(self._due)
            if what == _FLOW:
                self._flow(index, now)
            else:
                self._done(index, now)

    def _start(self, index: int, now: float) -> None:
        message, costs = self._sent[index], self._costs
        self._ready[index] = now
        at = now
        if costs.overhead:
            at = self._busy[message.source] = max(now, self._busy.get(message.source, 0.0)) + costs.overhead
        at += self._routes[index].latency + costs.alpha
        heapq.heappush(self._due, (at, index, _FLOW))

    def _flow(self, index: int, now: float) -> None:
        self._flowing[index] = now
        route, size = self._routes[index].links, self._bytes[index]
        if size <= 0.0 or not route:
            self._deliver(index, now)
            return
        self._flows.add(route, size, index, now)

    def _deliver(self, index: int, now: float) -> None:
        message, costs = self._sent[index], self._costs
        self._arrived[index] = now
        for then in self._dependencies.delivered[index]:
            self._release(then, index, now)
        work = costs.overhead + (costs.gamma * self._bytes[index] if message.action == "reduce" else 0.0)
        if work:
            free = self._busy[message.destination] = max(now, self._busy.get(message.destination, 0.0)) + work
            heapq.heappush(self._due, (free, index, _DONE))
        else:
            self._done(index, now)

    def _done(self, index: int, now: float) -> None:
        self._ended[index] = now
        for then in self._dependencies.done[index]:
            self._release(then, index, now)

    def _release(self, then: int, cause: int, now: float) -> None:
        self._dependencies.need[then] -= 1
        if self._dependencies.need[then]:
            return
        self._why[then] = cause
        if then < len(self._sent):
            self._start(then, now)
            return
        for after in (*self._dependencies.delivered[then], *self._dependencies.done[then]):
            self._release(after, then, now)

    # -- results

    def _report(self) -> Timing:
        assert not any(self._dependencies.need), "a schedule with circular dependencies, which the checker refuses"
        seconds = max(self._ended, default=0.0)
        crossed: dict[int, float] = {}
        for route, amount in zip(self._routes, self._bytes, strict=True):
            for link in route.links:
                crossed[link] = crossed.get(link, 0.0) + amount
        busiest = busiest_link(dict(sorted(crossed.items())), self._network.capacities, self._network.names)
        return timing_of("simulated", self._critical(seconds), busiest, seconds)

    def _critical(self, seconds: float) -> tuple[float, float, float]:
        """Return the seconds of the critical path in which its messages wait, flow and are reduced."""
        count = len(self._sent)
        at = max(range(count), key=lambda index: self._ended[index]) if count else -1
        until = seconds
        waiting = flowing = summing = 0.0
        while at >= 0:
            if at < count:
                ready, flow, arrived = self._ready[at], self._flowing[at], self._arrived[at]
                summing += max(0.0, until - arrived)
                flowing += min(until, arrived) - flow
                waiting += flow - ready
                until = ready
            at = self._why[at]
        return waiting, flowing, summing
