"""NVLinks behind a matrix's words: cables between two GPUs, or ports of one switch that all share.

"NV12" between all pairs of eight GPUs are not 56 bundles of twelve: a GPU with fewer links than all its words need
is on a switch (NVSwitch), to which each of its links leads. Such a word is a relation; the edges behind it join
each GPU with the switch of its fabric, as many links wide as the GPU's own widest word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.topology import rates
from psctl.topology.graph import Device, Link, bonded

MOST_LINKS = 18
"""Links of a GPU whose number is unknown: no GPU so far has more."""

Words = Mapping[tuple[str, str], str]
"""Pairs in the matrix's order, each with its word."""


def switched(words: Words, links: Mapping[str, int]) -> frozenset[tuple[str, str]]:
    """Return the pairs whose NVn goes through a switch.

    Args:
        words: the word of each pair, once a pair.
        links: number of NVLinks of each GPU that `nvidia-smi nvlink -s` lists.

    Returns:
        The pairs of which either GPU's n, summed over its peers, exceeds its number of links.
    """
    used: dict[str, int] = {}
    for pair, word in words.items():
        for ident in pair:
            used[ident] = used.get(ident, 0) + bonded(word)
    over = {ident for ident, count in used.items() if count > (links.get(ident) or MOST_LINKS)}
    return frozenset(pair for pair, word in words.items() if bonded(word) and not over.isdisjoint(pair))


def fabrics(pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return the GPUs of each switched fabric: those that switched pairs join, in order of their first pair."""
    groups: list[list[str]] = []
    for a, b in pairs:
        joined = [group for group in groups if a in group or b in group]
        merged = list(dict.fromkeys([ident for group in joined for ident in group] + [a, b]))
        groups = [group for group in groups if group not in joined] + [merged]
    return groups


def edges(words: Words, through: frozenset[tuple[str, str]], rate: Mapping[str, float]) -> list[Link]:
    """Return the direct bundles as edges, in the order of the words.

    Args:
        words: the word of each pair.
        through: pairs whose word goes through a switch: they are no edges.
        rate: of one NVLink of each GPU, bytes/s in one direction; the slower end counts.
    """
    return [
        Link(a, b, word, bonded(word) * _slower(a, b, rate), rates.latency(word), switched=False)
        for (a, b), word in words.items()
        if bonded(word) and (a, b) not in through
    ]


def ports(
    words: Words, through: frozenset[tuple[str, str]], rate: Mapping[str, float]
) -> tuple[list[Device], list[Link]]:
    """Return the switches behind switched words, and an edge from each GPU to the switch of its fabric.

    Args:
        words: the word of each pair.
        through: pairs whose word goes through a switch.
        rate: of one NVLink of each GPU, bytes/s in one direction.
    """
    devices: list[Device] = []
    links: list[Link] = []
    for index, group in enumerate(fabrics([pair for pair in words if pair in through])):
        switch = f"NVSW{index}"
        devices.append(Device(switch, "switch", name="NVSwitch", derived=True))
        for gpu in group:
            width = max(bonded(word) for pair, word in words.items() if pair in through and gpu in pair)
            speed = width * rate.get(gpu, rates.nvlink())
            links.append(Link(gpu, switch, "NVLink", speed, rates.latency("NVLink"), derived=True))
    return devices, links


def _slower(a: str, b: str, rate: Mapping[str, float]) -> float:
    return min(rate.get(a, rates.nvlink()), rate.get(b, rates.nvlink()))
