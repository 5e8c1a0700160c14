"""The strength of a graph: the maximum total weight of packed spanning trees, and the directions of their links.

Tutte and Nash-Williams: for a partition P of the devices, every spanning tree has at least |P|-1 links between parts;
no packing of trees weighs more than E(P) / (|P|-1), and the best packing reaches the minimum of these. There are too
many partitions to enumerate. For a guess g, Dilworth truncation finds the partition with the minimum E(P) - g (|P|-1)
(Cunningham 1985, Barahona 1992): devices are added one by one, and one minimum cut determines the parts that each
device joins. Newton's method then lowers the guess to that partition's ratio until none is lower (at most p-1 times).

The values m(k) of the devices have a second use. Over any set S they sum to at least E[S] + g, and over all devices to
E + g. So the links can be directed such that m(k) units enter each device k and none the first; then at least g units
enter every set without the first device, and by Edmonds' theorem trees of total weight g leave the first (Frank).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.algorithms.flows import flow

Parts = list[list[int]]
Table = list[list[int]]


def strength(wires: DirectLinks) -> tuple[Fraction, Parts]:
    """Return the minimum of E(P) / (|P|-1) over all partitions, in link units, and a partition that reaches it.

    Args:
        wires: at least two devices; the strength of a disconnected graph is 0.
    """
    table = wires.units()
    parts: Parts = [[node] for node in range(len(table))]
    while True:
        guess = Fraction(_between(wires, parts), len(parts) - 1)
        _, better = _truncated(table, guess, range(len(table)))
        if len(better) < 2 or Fraction(_between(wires, better), len(better) - 1) >= guess:
            return guess, parts
        parts = better


def directed(wires: DirectLinks, bound: Fraction, root: int) -> Table:
    """Return directed units such that bound x its denominator units flow from the root to every other device.

    Args:
        wires: devices and links.
        bound: their strength.
        root: the root of the trees.

    Returns:
        Units from each device to each other; both directions of a pair sum to its units times the bound's denominator.
    """
    count, scale = len(wires.nodes), bound.denominator
    order = [root, *(node for node in range(count) if node != root)]
    wanted, _ = _truncated(wires.units(), bound, order)
    wanted[root] = 0
    source, sink = count + len(wires.links), count + len(wires.links) + 1
    capacity = [[0] * (sink + 1) for _ in range(sink + 1)]
    for at, (a, b, units) in enumerate(wires.links, count):
        capacity[source][at] = capacity[at][a] = capacity[at][b] = units * scale
    for node in range(count):
        capacity[node][sink] = wanted[node]
    left = [list(row) for row in capacity]
    total, _ = flow(left, source, sink, keep=True)
    assert total == sum(wanted), "the devices' values sum to all units, and no set of devices exceeds its links"
    table = [[0] * count for _ in range(count)]
    for at, (a, b, _) in enumerate(wires.links, count):
        table[a][b], table[b][a] = left[b][at], left[a][at]
    return table


def _between(wires: DirectLinks, parts: Parts) -> int:
    """Return the units of the links between the parts."""
    label = {node: index for index, part in enumerate(parts) for node in part}
    return sum(units for a, b, units in wires.links if label[a] != label[b])


def _truncated(table: Table, guess: Fraction, order: Sequence[int]) -> tuple[list[int], Parts]:
    """Return the value of each device, times the guess's denominator, and the partition of minimum E(P) - guess |P|.

    m(k) = max over S of E[S] + guess - m(S without k), where S contains k and devices before it; the sets S that reach
    the maximum and intersect form one part.
    """
    answers = [0] * len(table)
    parts: Parts = []
    for place, k in enumerate(order):
        answer, tight = _answer(table, answers, order[:place], k, guess.denominator)
        answers[k] = answer + guess.numerator
        met = [part for part in parts if not tight.isdisjoint(part)]
        parts = [part for part in parts if part not in met]
        parts.append(sorted({*tight, *(node for part in met for node in part)}))
    return answers, sorted(parts)


def _answer(table: Table, answers: list[int], before: Sequence[int], k: int, scale: int) -> tuple[int, set[int]]:
    """Return the maximum of scale E[S] - m(S without k) over sets S of k and devices before it, and the smallest S.

    E[S] is half of the units at the devices of S minus those that leave S, so twice the maximum is a minimum cut. k is
    the source; a device with a gain from being in S is linked to the source, one with a loss to the sink.
    """
    nodes = [*before, k]
    source, sink = len(before), len(nodes)
    capacity = [[scale * table[a][b] for b in nodes] + [0] for a in nodes] + [[0] * (sink + 1)]
    best = sum(capacity[source])
    for at, node in enumerate(before):
        gain = sum(capacity[at][:sink]) - 2 * answers[node]
        if gain > 0:
            capacity[source][at] += gain
            best += gain
        else:
            capacity[at][sink] -= gain
    cut, side = flow(capacity, source, sink)
    return (best - cut) // 2, {nodes[at] for at in side}
