"""The max-min fair rates of flows that share links.

A set of rates is max-min fair when none can grow without making a smaller or equal one smaller. It is unique, and
progressive filling finds it (Bertsekas and Gallager, Data Networks, 6.5.2): let all rates grow together; when a link
is full, the flows across it stay as they are; go on with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
    across: dict[int, list[tuple[int, ...]]] = {}
    for route in flows:
        for link in route:
            across.setdefault(link, []).append(route)
    return fill(flows, across, capacities)


def fill(
    flows: Mapping[tuple[int, ...], int],
    across: Mapping[int, Collection[tuple[int, ...]]],
    capacities: Sequence[float],
) -> dict[tuple[int, ...], float]:
    """Return the rates as `fair_rates` does, where it is known already which of the routes cross each link."""
    rates: dict[tuple[int, ...], float] = {}
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
        rates[route] = float("inf")  # it crosses nothing
    return rates
