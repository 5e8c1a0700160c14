"""The arrangement of ranks on the machines, as options of schedules: orders, groups, weights, rings, trees.

A ring should cross each slow cable once in each direction, so ranks of one host, and hosts of one switch, are adjacent.
A rank with a slow port is placed where it carries each byte once: at the end of a chain, at a leaf of a tree, and with
a small share where ranks add parts for each other.

Shares for the latter: rank i adds the part w_i for all p, so it sends (1 - w_i) of the vector to the other owners and
its sum to p - 1 ranks, (1 + (p-2) w_i) S in all, and receives as much. With ports B_i all done at T:
w_i = max(0, (T B_i / S - 1) / (p - 2)), with T so that they sum to 1; never sooner than S / B_slowest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from psctl.grouping import grouped
from psctl.plan.plan_input import PlanInput
from psctl.schedule.algorithms.catalog import WeightedRing
from psctl.schedule.algorithms.trees import WeightedTree
from psctl.topology.algorithms import trees as packing
from psctl.topology.algorithms.direct_links import DirectLinks, direct_links
from psctl.topology.algorithms.islands import hierarchy
from psctl.topology.algorithms.rings import rings as ring_search

Groups = tuple[tuple[int, ...], ...]
Order = tuple[int, ...]

SHARES = 64
"""Weights are whole parts of this, or of four times the ranks; finer ones save less than 1%."""

PROBED = 64
"""Ranks up to which the routes to all others determine the rate of a rank's port; with more, routes to a few."""


def by_host(inputs: PlanInput) -> Groups:
    """Return the ranks of each host, hosts in the order of their first ranks."""
    return _grouped(inputs.hosts)


def by_rack(inputs: PlanInput) -> Groups:
    """Return the ranks behind each network switch; a host without one is its own group."""
    switch = racks(inputs)
    return _grouped([switch[host] for host in inputs.hosts])


def by_level(inputs: PlanInput) -> tuple[Groups, ...]:
    """Return the groups of ranks of each level of the machines, from inside to outside: NVLink, PCIe switches,
    processors, hosts, racks by their label."""
    several = len(inputs.cluster.hosts) > 1
    ranks_at = grouped(
        (place if several else place.rpartition("/")[2], rank) for rank, place in enumerate(inputs.ranks)
    )
    found = []
    for level in hierarchy(inputs.cluster):
        groups = tuple(tuple(rank for name in group for rank in ranks_at.get(name, ())) for group in level.groups)
        kept = tuple(group for group in groups if group)
        if sum(map(len, kept)) == inputs.world:  # else the ranks are hosts, and the groups are of their GPUs
            found.append(kept)
    return tuple(found)


def order(inputs: PlanInput) -> Order:
    """Return all ranks with those of a host adjacent, hosts of a switch adjacent, and GPUs in the order of their
    cables."""
    rack = {rank: at for at, group in enumerate(by_rack(inputs)) for rank in group}
    hosts = sorted(by_host(inputs), key=lambda group: (rack[group[0]], group[0]))
    return tuple(rank for group in hosts for rank in _along(inputs, group))


def slow_last(ranks: Sequence[int], port: Sequence[float]) -> Order:
    """Return the order with the slowest port at its end and the next slowest at its start, where they are slower than
    most: the ends of a chain carry each byte once."""
    middle = sorted(port)[len(port) // 2]
    slow = sorted((rank for rank in ranks if port[rank] < 0.95 * middle), key=lambda rank: port[rank])[:2]
    rest = [rank for rank in ranks if rank not in slow]
    return (*slow[1:], *rest, *slow[:1])


def fastest_first(port: Sequence[float]) -> Order:
    """Return the ranks with the widest ports first: a tree's first places carry most."""
    return tuple(sorted(range(len(port)), key=lambda rank: (-port[rank], rank)))


def ports(inputs: PlanInput) -> list[float]:
    """Return the bytes/s of each rank's port: the narrowest link of its widest route, shared with the other ranks
    behind the same link."""
    found: list[tuple[float, int]] = []
    for rank, place in enumerate(inputs.ranks):
        step = 1 if inputs.world <= PROBED else (inputs.world - 1) // 4
        others = [inputs.ranks[(rank + away) % inputs.world] for away in range(1, inputs.world, step)]
        found.append(max((_narrowest(inputs, place, other) for other in others), default=(math.inf, -1)))
    behind = Counter(link for _, link in found)
    return [capacity / behind[link] for capacity, link in found]


def least_outward_rate(inputs: PlanInput) -> float:
    """Return the least bytes/s of a rank when all ranks send to other hosts at once (to other ranks on a single host),
    for schedules that ignore locality."""
    found = []
    for rank, place in enumerate(inputs.ranks):
        away = next(
            (other for other, host in zip(inputs.ranks, inputs.hosts, strict=True) if host != inputs.hosts[rank]), ""
        )
        found.append(_narrowest(inputs, place, away or inputs.ranks[rank - 1]))
    behind = Counter(link for _, link in found)
    return min(capacity / behind[link] for capacity, link in found)


def shares(port: Sequence[float]) -> tuple[int, ...]:
    """Return the weights of ranks that add parts for each other, with which all ports finish at the same time.

    Args:
        port: bytes/s of each rank, more than 0.

    Returns:
        whole numbers without a common factor; equal ones where no others are better.
    """
    count = len(port)
    if count < 3 or max(port) <= 1.05 * min(port):
        return (1,) * count
    low, high = 1 / min(port), 2 / min(port)
    if sum(_part(low, rate, count) for rate in port) >= 1:
        high = low  # the slowest port decides, whatever the others carry
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_part(middle, rate, count) for rate in port) >= 1 else (middle, high)
    parts = [_part(high, rate, count) for rate in port]
    weights = [round(max(SHARES, 4 * count) * part / sum(parts)) for part in parts]
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def rings(inputs: PlanInput, ranks: Order) -> tuple[WeightedRing, ...]:
    """Return the rings that share no cable among the GPUs of one host; elsewhere one ring of all, in this order."""
    graph = inputs.cluster.host(inputs.hosts[0])
    if inputs.nodes == 1 and inputs.gpus and graph is not None:
        ids = [place.rpartition("/")[2] for place in inputs.ranks]
        rank = {one: number for number, one in enumerate(ids)}
        found = tuple(
            (tuple(rank[one] for one in ring.order), ring.width)
            for ring in ring_search(direct_links(graph.graph, ids)).rings
        )
        if found:
            return found
    return ((ranks, 1),)


def trees(inputs: PlanInput, port: Sequence[float]) -> tuple[WeightedTree, ...]:
    """Return the trees that share no cable among the GPUs of one host; elsewhere stars, one around each rank that has a
    share, as ranks on one switch can use them."""
    graph = inputs.cluster.host(inputs.hosts[0])
    if inputs.nodes == 1 and inputs.gpus and graph is not None:
        ids = [place.rpartition("/")[2] for place in inputs.ranks]
        rank = {one: number for number, one in enumerate(ids)}
        found = packing.all_reduce(direct_links(graph.graph, ids)).trees
        if found:
            whole = math.lcm(*(tree.weight.denominator for tree in found))
            return tuple(
                (rank[tree.root], tuple((rank[a], rank[b]) for a, b in tree.edges), int(tree.weight * whole))
                for tree in found
            )
    ranks = range(inputs.world)
    return tuple(
        (root, tuple((root, rank) for rank in ranks if rank != root), weight)
        for root, weight in enumerate(shares(port))
        if weight
    )


def broadcast_trees(inputs: PlanInput, port: Sequence[float]) -> tuple[WeightedTree, ...]:
    """Return trees from rank 0 that share no direction of a direct link, as many as the links can carry (Blink): among
    the GPUs of one host, or hosts of one rank each that cables join directly; elsewhere those of `trees`."""
    wires = _direct(inputs)
    if wires is None or not wires.links or not wires.connected:
        return trees(inputs, port)
    _, found = packing.trees_from(wires.units(), 0)
    divisor = math.gcd(*found.values())
    return tuple((0, edges, weight // divisor) for edges, weight in found.items())


def _direct(inputs: PlanInput) -> DirectLinks | None:
    """Return the direct links between ranks; None where ranks have none."""
    graph = inputs.cluster.host(inputs.hosts[0])
    if inputs.nodes == 1:
        ids = [place.rpartition("/")[2] for place in inputs.ranks]
        return direct_links(graph.graph, ids) if inputs.gpus and graph is not None else None
    if inputs.nodes < inputs.world:
        return None
    at = {host: rank for rank, host in enumerate(inputs.hosts)}
    rates: dict[tuple[int, int], float] = {}
    for cable in inputs.cluster.between:
        if cable.a in at and cable.b in at and cable.bandwidth:
            a, b = sorted((at[cable.a], at[cable.b]))
            rates[a, b] = rates.get((a, b), 0.0) + cable.bandwidth
    least = min(rates.values(), default=0.0)
    links = tuple((a, b, round(rate / least)) for (a, b), rate in sorted(rates.items()))
    return DirectLinks(tuple(inputs.hosts), links, least)


def _part(time: float, rate: float, count: int) -> float:
    return max(0.0, (time * rate - 1) / (count - 2))


def _narrowest(inputs: PlanInput, place: str, other: str) -> tuple[float, int]:
    links = inputs.network.route(place, other).links
    return min(((inputs.network.capacities[link], link) for link in links), default=(math.inf, -1))


def _grouped(keys: Iterable[Hashable]) -> Groups:
    return tuple(map(tuple, grouped((key, rank) for rank, key in enumerate(keys)).values()))


def racks(inputs: PlanInput) -> dict[str, str]:
    """Return the switch of each host: the other end of its widest cable, or the host itself where that is a host."""
    hosts = {host.name for host in inputs.cluster.hosts}
    found = {host: (0.0, host) for host in hosts}
    for cable in inputs.cluster.between:
        for host, end in ((cable.a, cable.b), (cable.b, cable.a)):
            if host in hosts and end not in hosts:
                found[host] = max(found[host], (cable.bandwidth or 0.0, end))
    return {host: switch for host, (_, switch) in found.items()}


def _along(inputs: PlanInput, group: Sequence[int]) -> Sequence[int]:
    """Return the ranks of one host in the order of a ring of their cables."""
    graph = inputs.cluster.host(inputs.hosts[group[0]])
    ids = [inputs.ranks[rank].rpartition("/")[2] for rank in group]
    if graph is None or inputs.ranks[group[0]] == inputs.hosts[group[0]] or len(group) < 3:
        return group
    found = ring_search(direct_links(graph.graph, ids)).rings
    return [group[ids.index(one)] for one in found[0].order] if found else group
