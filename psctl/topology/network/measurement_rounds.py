"""Rounds of pairs of hosts: each pair once, no host twice in a round, in the fewest rounds (circle method).

All hosts but the first rotate by one position a round; hosts that face each other are a pair. n hosts need n - 1 rounds
if n is even, and n if it is odd (one host idles in each). This is the minimum: a round has at most n / 2 pairs, and
there are n (n - 1) / 2 (Kirkman 1847; Lucas 1883).
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[str, str]
"""Two hosts."""


def rounds(hosts: Sequence[str]) -> list[tuple[Pair, ...]]:
    """Return rounds of which each pair of hosts is in exactly one.

    Args:
        hosts: distinct names. The host that is earlier in the list is first in a pair, so that neighbours in the list
            send in the same direction at the same time.
    """
    place = {host: number for number, host in enumerate(hosts)}
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(a, b) for a, b in facing if a is not None and b is not None]
        found.append(tuple((a, b) if place[a] < place[b] else (b, a) for a, b in met))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]
