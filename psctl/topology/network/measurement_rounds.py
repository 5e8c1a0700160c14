"""Every pair of hosts once, in as few rounds as can be, no host twice in a round: the circle method of tournaments.

All hosts but the first rotate by one place a round; hosts that face each other are a pair. n hosts meet in n - 1
rounds when n is even, in n when it is odd (one of them rests in each): the least there can be, for a round holds n / 2
pairs and there are n (n - 1) / 2 (Kirkman 1847; Lucas 1883).
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[str, str]
"""Two hosts."""


def rounds(hosts: Sequence[str]) -> list[tuple[Pair, ...]]:
    """Return the rounds of a tournament: each pair of hosts is in exactly one of them.

    Args:
        hosts: their names, each once. In a pair the earlier of the two comes first, so that neighbours in the list send
            in the same direction at once.
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
