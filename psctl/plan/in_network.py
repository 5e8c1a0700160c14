"""The time of an all-reduce that InfiniBand switches would compute: a row to compare with, which psctl cannot deploy.

Each host sends its sum up a tree of switches once and receives the result once, while any schedule between hosts has a
port carry nearly twice the vector. Deploying it needs the switches' aggregation manager and NCCL's plugin for it, which
the administrator of the fabric installs; NCCL then uses it by itself, under strategy `native`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from psctl.grouping import grouped
from psctl.plan.plan_input import PlanInput

NAME = "SHARP"

FORMULA = "T = 2 (G-1)/G S/b inside a host of G ranks + L across the switches and back + S/B of a host's ports"

SOURCE = (
    "Graham and others, Scalable Hierarchical Aggregation Protocol (SHArP): A Hardware Architecture for Efficient Data "
    "Reduction, COMHPC 2016"
)

WHY_NOT = "psctl cannot deploy it: InfiniBand switches add, by the fabric's aggregation manager and NCCL's plugin"


class InNetwork(msgspec.Struct, frozen=True):
    """The predicted time of sums in switches: seconds, bytes that a host's ports send, and where they come from."""

    strategy: str
    seconds: float
    bytes_per_host: float
    formula: str
    source: str
    why_not: str


def in_network(inputs: PlanInput, size: float) -> InNetwork | None:
    """Return the time of an all-reduce in the switches; None unless all ranks' hosts have InfiniBand ports.

    Args:
        inputs: the machines and the ranks.
        size: bytes of a rank's vector.
    """
    rates, hosts = _ports(inputs), dict.fromkeys(inputs.hosts)
    if len(hosts) < 2 or any(host not in rates for host in hosts):
        return None
    first, *others = hosts
    latency = max(inputs.network.route(first, other).latency for other in others)
    slowest = min(rates[host] for host in hosts)
    ranks = grouped(zip(inputs.hosts, inputs.ranks, strict=True))
    inside = max(_inside(inputs, tuple(places), size) for places in ranks.values())
    return InNetwork(NAME, round(inside + latency + size / slowest, 9), size, FORMULA, SOURCE, WHY_NOT)


def _ports(inputs: PlanInput) -> Mapping[str, float]:
    """Return the payload bytes/s of each host's InfiniBand ports together, where all are known."""
    found: dict[str, float] = {}
    for cable in inputs.cluster.between:
        if cable.type == "InfiniBand":
            for end in (cable.a, cable.b):
                found[end] = found.get(end, 0.0) + (cable.bandwidth or math.nan)
    return {end: rate for end, rate in found.items() if not math.isnan(rate)}


def _inside(inputs: PlanInput, places: tuple[str, ...], size: float) -> float:
    """Return the seconds in which a host's ranks add their vectors in a ring, and spread the result."""
    if len(set(places)) < 2:
        return 0.0
    crossed: dict[int, int] = {}
    for at, place in enumerate(places):
        for link in inputs.network.route(place, places[(at + 1) % len(places)]).links:
            crossed[link] = crossed.get(link, 0) + 1
    slowest = max(times / inputs.network.capacities[link] for link, times in crossed.items())
    return 2 * (len(places) - 1) / len(places) * size * slowest
