"""The strength of a graph: how much all spanning trees together can carry, and the partition that allows no more.

Tutte and Nash-Williams: cut a graph into parts; every spanning tree has at least |P|-1 links between them, so no
packing of trees weighs more than E(P) / (|P|-1), and the best one weighs as much as the least of these. There are too
many partitions to try. For a guess g, the partition with the least E(P) - g (|P|-1) is found by Dilworth truncation
(Cunningham 1985, Barahona 1992): devices come one by one, and each asks, by one least cut, which of the parts so far it
should join. Newton's method then lowers the guess to that partition's ratio until nothing is less (at most p-1 times).
"""

from __future__ import annotations

from fractions import Fraction

from psctl.topology.flows import flow
from psctl.topology.wires import Wires

Parts = list[list[int]]


def strength(wires: Wires) -> tuple[Fraction, Parts]:
    """Return min over partitions of E(P) / (|P|-1) in link units, exactly, and a partition that reaches it.

    Args:
        wires: at least two devices. Of a graph that is not connected the strength is 0.
    """
    table = wires.units()
    parts: Parts = [[node] for node in range(len(table))]
    while True:
        guess = Fraction(_between(wires, parts), len(parts) - 1)
        better = _least(table, guess)
        if len(better) < 2 or Fraction(_between(wires, better), len(better) - 1) >= guess:
            return guess, parts
        parts = better


def _between(wires: Wires, parts: Parts) -> int:
    """Units of the links between the parts."""
    label = {node: index for index, part in enumerate(parts) for node in part}
    return sum(units for a, b, units in wires.links if label[a] != label[b])


def _least(table: list[list[int]], guess: Fraction) -> Parts:
    """The partition with the least E(P) - guess |P|.

    y(k) = min over S of -x(E[S]) - guess - y(S without k), where S holds k and devices before it; the S that attain it
    and meet each other are one part. Doubled and multiplied by the guess's denominator, all numbers are whole.
    """
    scale = guess.denominator
    values: list[int] = []
    parts: Parts = []
    for k in range(len(table)):
        value, tight = _truncated(table, values, k, scale)
        values.append(value - 2 * guess.numerator)
        met = [part for part in parts if not tight.isdisjoint(part)]
        parts = [part for part in parts if part not in met]
        parts.append(sorted({*tight, *(node for part in met for node in part)}))
    return sorted(parts)


def _truncated(table: list[list[int]], values: list[int], k: int, scale: int) -> tuple[int, set[int]]:
    """Least of 2 scale (-x(E[S])) - y(S without k) over sets S of 0..k that hold k, and the smallest such S.

    As 2 x(E[S]) is the units at the devices of S less those that leave S, it is a least cut: k is the source; a device
    that gains by being in S hangs on the source, one that loses on the sink.
    """
    nodes, sink = range(k + 1), k + 1
    capacity = [[scale * table[a][b] for b in nodes] + [0] for a in nodes] + [[0] * (k + 2)]
    base = -scale * sum(table[k][: k + 1])
    for node in range(k):
        gain = values[node] + scale * sum(table[node][: k + 1])
        if gain > 0:
            capacity[k][node] += gain
            base -= gain
        else:
            capacity[node][sink] -= gain
    cut, side = flow(capacity, k, sink)
    return base + cut, side
