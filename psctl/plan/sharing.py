"""The max-min fair rates of flows that share links.

A set of rates is max-min fair when none can grow without making a smaller or equal one smaller. It is unique, and
progressive filling finds it (Bertsekas and Gallager, Data Networks, 6.5.2): let all rates grow together; when a link
is full, the flows across it stay as they are; go on with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NEAR = 1e-9
"""Shares and times that differ by no more than this part of themselves are one: symmetric things stay symmetric."""


def fair_rates(flows: Mapping[tuple[int, ...], int], capacities: Sequence[float]) -> dict[tuple[int, ...], float]:
    """Return the rate of one flow of each route.

    Args:
        flows: how many flows take a route (its directed links, each once).
        capacities: bytes/s of each link.

    Returns:
        bytes/s of a single flow of each route; infinite for a route without links.
    """
    rates = {route: float("inf") for route in flows}
    unfixed: dict[int, int] = {}
    routes: dict[int, list[tuple[int, ...]]] = {}
    for route, count in flows.items():
        for link in route:
            if link in unfixed:
                unfixed[link] += count
                routes[link].append(route)
            else:
                unfixed[link] = count
                routes[link] = [route]
    left = {link: capacities[link] for link in unfixed}
    shares = {link: capacities[link] / count for link, count in unfixed.items()}
    fixed: set[tuple[int, ...]] = set()
    while shares:
        least = min(shares.values())
        bound = least * (1 + NEAR)
        touched: set[int] = set()
        for link in [link for link, share in shares.items() if share <= bound]:
            for route in routes[link]:
                if route not in fixed:
                    fixed.add(route)
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
    return rates
