"""Derives NVLinks from the link types of a matrix: direct links between two GPUs, or ports of a shared switch.

"NV12" between all pairs of eight GPUs does not mean 28 bundles of twelve links: a GPU with fewer links than the sum of
its NVn is on a switch (NVSwitch), to which each of its links leads. Such a pair is a relation; an edge joins each GPU
to the switch of its fabric, with as many links as the GPU's largest NVn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from psctl.topology import rates
from psctl.topology.graph import Device, Link, bonded, components

MOST_LINKS = 18
"""Assumed number of links of a GPU where it is unknown: no GPU so far has more."""

LinkTypes = Mapping[tuple[str, str], str]
"""The link type of each pair, in the matrix's order."""


def switched(types: LinkTypes, links: Mapping[str, int]) -> frozenset[tuple[str, str]]:
    """Return the pairs whose NVn goes through a switch.

    Args:
        types: the link type of each pair, once a pair.
        links: number of NVLinks of each GPU that `nvidia-smi nvlink -s` lists.

    Returns:
        The pairs with a GPU whose n, summed over its peers, exceeds its number of links.
    """
    used: dict[str, int] = {}
    for pair, word in types.items():
        for ident in pair:
            used[ident] = used.get(ident, 0) + bonded(word)
    over = {ident for ident, count in used.items() if count > (links.get(ident) or MOST_LINKS)}
    return frozenset(pair for pair, word in types.items() if bonded(word) and not over.isdisjoint(pair))


def edges(types: LinkTypes, through: frozenset[tuple[str, str]], rate: Mapping[str, float]) -> list[Link]:
    """Return the direct bundles as edges, in the order of `types`.

    Args:
        types: the link type of each pair.
        through: pairs joined through a switch, which are no edges.
        rate: of one NVLink of each GPU, bytes/s in one direction; the slower end counts.
    """
    usual = rates.nvlink()
    return [
        Link(
            a, b, word, bonded(word) * min(rate.get(a, usual), rate.get(b, usual)), rates.latency(word), switched=False
        )
        for (a, b), word in types.items()
        if bonded(word) and (a, b) not in through
    ]


def ports(
    types: LinkTypes, through: frozenset[tuple[str, str]], rate: Mapping[str, float]
) -> tuple[list[Device], list[Link]]:
    """Return the switches of switched pairs, and an edge from each GPU to the switch of its fabric.

    Args:
        types: the link type of each pair.
        through: pairs joined through a switch.
        rate: of one NVLink of each GPU, bytes/s in one direction.
    """
    pairs = [pair for pair in types if pair in through]
    devices: list[Device] = []
    links: list[Link] = []
    for index, group in enumerate(components(itertools.chain(*pairs), pairs)):
        switch = f"NVSW{index}"
        devices.append(Device(switch, "switch", name="NVSwitch", derived=True))
        for gpu in group:
            width = max(bonded(word) for pair, word in types.items() if pair in through and gpu in pair)
            speed = width * rate.get(gpu, rates.nvlink())
            links.append(Link(gpu, switch, "NVLink", speed, rates.latency("NVLink"), derived=True))
    return devices, links
