"""The rates of flows that share links, as flows start and end.

A set of rates is max-min fair when none can grow without making a smaller or equal one smaller. It is unique, and
progressive filling finds it (Bertsekas and Gallager, Data Networks, 6.5.2): let all rates grow together; when a link
is full, the flows across it keep their rate; continue with the others.

A flow that starts or ends changes only the rates of those that share a link with it, directly or through others that
do; so only that part of the network is computed again. The rates of a set of flows are kept, because pipelines return
to the same sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

NEAR = 1e-9
"""Shares and times that differ by no more than this part of themselves are equal, so symmetric flows stay symmetric."""

_Links = tuple[int, ...]

_REMEMBERED = 256


def fair_rates(
    flows: Mapping[_Links, int], across: Mapping[int, Collection[_Links]], capacities: Sequence[float]
) -> dict[_Links, float]:
    """Return the max-min fair rate of one flow of each route.

    Args:
        flows: how many flows take a route (its directed links, each once).
        across: the routes that cross each link.
        capacities: bytes/s of each link.

    Returns:
        bytes/s of a single flow of each route; infinite for a route without links.
    """
    rates: dict[_Links, float] = {}
    unfixed = {link: sum([flows[route] for route in routes]) for link, routes in across.items()}
    left = {link: capacities[link] for link in across}
    shares = {link: left[link] / count for link, count in unfixed.items()}
    while shares:
        least = min(shares.values())
        bound = least * (1 + NEAR)
        touched: set[int] = set()
        for link in [link for link, share in shares.items() if share <= bound]:
            for route in across[link]:
                if route not in rates:
                    rates[route] = least
                    count = flows[route]
                    for other in route:
                        left[other] -= least * count
                        unfixed[other] -= count
                    touched.update(route)
        for link in touched:
            if unfixed[link]:
                shares[link] = left[link] / unfixed[link]
            else:
                del shares[link]
    for route in flows.keys() - rates.keys():
        rates[route] = float("inf")  # it crosses no link
    return rates


class _Flows:
    """The flows of one route: all have one rate, so one counter holds the bytes sent by each since the first began."""

    __slots__ = ("finish", "rate", "served", "since", "waiting")

    def __init__(self, now: float) -> None:
        self.waiting: list[tuple[float, int]] = []  # (served when it ends, message), a heap
        self.served = 0.0
        self.since = now
        self.rate = 0.0
        self.finish = float("inf")

    def serve(self, now: float) -> None:
        self.served += self.rate * (now - self.since)
        self.since = now


class ActiveFlows:
    """The flows of a moment, their rates, and when each ends.

    Args:
        capacities: bytes/s of each link.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self._capacities = capacities
        self._active: dict[_Links, _Flows] = {}
        self._across: dict[int, dict[_Links, None]] = {}  # link -> the active routes over it, in order
        self._ends: list[tuple[float, _Links]] = []  # when a route's next flow ends; outdated ones are left in
        self._changed: dict[_Links, None] = {}
        self._rates: dict[frozenset[tuple[_Links, int]], dict[_Links, float]] = {}

    def add(self, route: _Links, size: float, index: int, now: float) -> None:
        """Start the flow of message `index` of `size` bytes over these links."""
        flows = self._active.get(route)
        if flows is None:
            flows = self._active[route] = _Flows(now)
            for link in route:
                self._across.setdefault(link, {})[route] = None
        else:
            flows.serve(now)
        heapq.heappush(flows.waiting, (flows.served + size, index))
        self._changed[route] = None

    def next_end(self) -> float:
        """Return when the next flow ends, infinite when there is none."""
        while self._ends:
            finish, route = self._ends[0]
            flows = self._active.get(route)
            if flows is not None and flows.finish == finish:
                return finish
            heapq.heappop(self._ends)
        return float("inf")

    def remove_ended(self, now: float) -> list[int]:
        """Remove the flows that end at this moment and return their messages."""
        found: list[int] = []
        while self.next_end() <= now * (1 + NEAR):
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

    def update_rates(self, now: float) -> None:
        """Compute the rates from now on of the flows that share links with those that started or ended."""
        part, across = self._affected()
        if part:
            counts = {route: len(flows.waiting) for route, flows in part.items()}
            key = frozenset(counts.items())
            rates = self._rates.get(key)
            if rates is None:
                if len(self._rates) >= _REMEMBERED:
                    self._rates.clear()
                rates = self._rates[key] = fair_rates(counts, across, self._capacities)
            for route, flows in part.items():
                rate = rates[route]
                if rate != flows.rate or route in self._changed:
                    flows.serve(now)
                    flows.rate = rate
                    flows.finish = now + (flows.waiting[0][0] - flows.served) / rate
                    heapq.heappush(self._ends, (flows.finish, route))
        self._changed.clear()

    def _affected(self) -> tuple[dict[_Links, _Flows], dict[int, dict[_Links, None]]]:
        """Return the active routes that share links with the changed ones, directly or through others; and the
        routes across each of these links."""
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
