"""The flows that are under way: who shares which link with whom, at which rate, until when.

A flow that begins or ends changes the rates of those alone that share a link with it, directly or through others that
do; so only that part of the network is computed again. What a part's rates are for a set of flows is remembered, for
pipelines come back to the same sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from psctl.plan.simulation.fair_rates import NEAR, fill

_Links = tuple[int, ...]

_REMEMBERED = 256


class _Flows:
    """The flows of one route: all have one rate, so one counter says what each was served since the route woke."""

    __slots__ = ("finish", "rate", "served", "since", "waiting")

    def __init__(self, now: float) -> None:
        self.waiting: list[tuple[float, int]] = []  # (served when it is through, message), a heap
        self.served = 0.0
        self.since = now
        self.rate = 0.0
        self.finish = float("inf")

    def serve(self, now: float) -> None:
        self.served += self.rate * (now - self.since)
        self.since = now


class Flowing:
    """All flows of a moment.

    Args:
        capacities: bytes/s of each link.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self._capacities = capacities
        self._active: dict[_Links, _Flows] = {}
        self._across: dict[int, dict[_Links, None]] = {}  # link -> the active routes over it, in order
        self._ends: list[tuple[float, _Links]] = []  # when a route's next flow ends; those no longer true are left in
        self._changed: dict[_Links, None] = {}
        self._rates: dict[frozenset[tuple[_Links, int]], dict[_Links, float]] = {}

    def add(self, route: _Links, size: float, index: int, now: float) -> None:
        """Begin to send message `index` of `size` bytes over these links."""
        flows = self._active.get(route)
        if flows is None:
            flows = self._active[route] = _Flows(now)
            for link in route:
                self._across.setdefault(link, {})[route] = None
        else:
            flows.serve(now)
        heapq.heappush(flows.waiting, (flows.served + size, index))
        self._changed[route] = None

    def soonest(self) -> float:
        """Return when the next flow ends, infinite when none is under way."""
        while self._ends:
            finish, route = self._ends[0]
            flows = self._active.get(route)
            if flows is not None and flows.finish == finish:
                return finish
            heapq.heappop(self._ends)
        return float("inf")

    def ended(self, now: float) -> list[int]:
        """Return the messages that are through at this moment, and take them out."""
        found: list[int] = []
        while self.soonest() <= now * (1 + NEAR):
            _, route = heapq.heappop(self._ends)
            flows = self._active[route]
            flows.serve(now)
            bound = flows.waiting[0][0] * (1 + NEAR)
            while flows.waiting and flows.waiting[0][0] <= bound:
                found.append(heapq.heappop(flows.waiting)[1])
            flows.finish = float("inf")
            if not flows.waiting:
                del self._active[route]
                for link in route:
                    del self._across[link][route]
            self._changed[route] = None
        return found

    def share(self, now: float) -> None:
        """Give the flows that what began or ended has touched their fair rates from now on."""
        part, across = self._touched()
        if part:
            counts = {route: len(flows.waiting) for route, flows in part.items()}
            key = frozenset(counts.items())
            rates = self._rates.get(key)
            if rates is None:
                if len(self._rates) >= _REMEMBERED:
                    self._rates.clear()
                rates = self._rates[key] = fill(counts, across, self._capacities)
            for route, flows in part.items():
                rate = rates[route]
                if rate != flows.rate or route in self._changed:
                    flows.serve(now)
                    flows.rate = rate
                    flows.finish = now + (flows.waiting[0][0] - flows.served) / rate
                    heapq.heappush(self._ends, (flows.finish, route))
        self._changed.clear()

    def _touched(self) -> tuple[dict[_Links, _Flows], dict[int, dict[_Links, None]]]:
        """Return the active routes that share links with the changed ones, directly or through others; and who
        crosses each of these links."""
        across: dict[int, dict[_Links, None]] = {}
        part: dict[_Links, _Flows] = {}
        links = [link for route in self._changed for link in route]
        while links:
            link = links.pop()
            routes = self._across.get(link)
            if not routes or link in across:
                continue
            across[link] = routes
            for route in routes:
                if route not in part:
                    part[route] = self._active[route]
                    links.extend(route)
        return part, across
