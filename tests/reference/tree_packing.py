"""Packings of trees that psctl does not need: for a broadcast, and of a limited number of trees.

The heaviest packing of given trees into link units is found by the simplex method on whole numbers.

max sum w(T) such that the trees over each link weigh no more than its units together. The dual gives each link a price;
a tree whose links cost less than 1 together makes the packing heavier. The basis' inverse is kept as whole numbers over
one determinant (Edmonds, Bareiss), so nothing is rounded; the lexicographic rule keeps it from cycling.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.algorithms.trees import PackedTree, TreePacking, all_reduce, trees_from

Columns = frozenset[int]
"""A tree: the indices of its links."""


def broadcast(wires: DirectLinks, root: str) -> TreePacking:
    """Pack trees that all start at one device.

    Args:
        wires: devices and their direct links, each with its units in both directions.
        root: the device that has what all others need.

    Returns:
        Trees with whole weights; their total is the bound. None where the links don't join all devices.
    """
    bound, found = trees_from(wires.units(), wires.nodes.index(root))
    trees = [
        PackedTree(root, tuple((wires.nodes[a], wires.nodes[b]) for a, b in edges), Fraction(weight))
        for edges, weight in found.items()
    ]
    ordered = sorted(trees, key=lambda tree: (-tree.weight, tree.depth, tree.edges))
    return TreePacking(tuple(ordered), Fraction(bound), wires.unit)


def limited(wires: DirectLinks, most: int) -> TreePacking:
    """Pack at most so many trees for an all-reduce: trees with the least weights are left out, half of those too many
    at a time, and the others weighed again."""
    whole = all_reduce(wires)
    index = {frozenset((wires.nodes[a], wires.nodes[b])): at for at, (a, b, _) in enumerate(wires.links)}
    trees = {frozenset(index[frozenset(edge)] for edge in tree.edges): tree for tree in whole.trees}
    found = {links: tree.weight for links, tree in trees.items()}
    while len(found) > most:
        heavy = sorted(found, key=lambda links: (-found[links], sorted(links)))
        found = heaviest([count for _, _, count in wires.links], heavy[: most + (len(found) - most) // 2])
    kept = (PackedTree(trees[links].root, trees[links].edges, weight) for links, weight in found.items())
    return TreePacking(tuple(kept), whole.bound, wires.unit)


def heaviest(units: Sequence[int], trees: Sequence[Columns]) -> dict[Columns, Fraction]:
    """Return the trees that have a weight in a heaviest packing, and the weights.

    Args:
        units: of each link, greater than 0.
        trees: those to choose from.
    """
    basis = _Basis(units)
    while True:
        best = max([*range(len(units)), *trees], key=basis.gain)
        if basis.gain(best) <= 0:
            return basis.weights()
        basis.enter(best)


class _Basis:
    """Rows of (what is used | inverse), all times the determinant. A column is a tree, or an index: units left over."""

    def __init__(self, units: Sequence[int]) -> None:
        size = range(len(units))
        self._determinant = 1
        self._rows = [[units[row], *(int(row == column) for column in size)] for row in size]
        self._columns: list[Columns | int] = list(size)
        self._value = [0] * (len(units) + 1)  # weight of all trees, and the prices

    def gain(self, column: Columns | int) -> int:
        """Return by how much, times the determinant, the packing gets heavier for each unit of a column."""
        if isinstance(column, int):
            return -self._value[column + 1]
        return self._determinant - sum(self._value[link + 1] for link in column)

    def weights(self) -> dict[Columns, Fraction]:
        """Return the trees of the basis that have a weight."""
        return {
            column: Fraction(row[0], self._determinant)
            for row, column in zip(self._rows, self._columns, strict=True)
            if row[0] and not isinstance(column, int)
        }

    def enter(self, column: Columns | int) -> None:
        """Put a column into the basis, in place of the first that it drives to nothing."""
        at = [column + 1] if isinstance(column, int) else [link + 1 for link in column]
        direction = [sum([row[one] for one in at]) for row in self._rows]
        leaving = self._leaving(direction)
        pivot, fixed, gain = direction[leaving], self._rows[leaving], self.gain(column)
        for index, row in enumerate(self._rows):
            if index != leaving:
                self._rows[index] = self._turned(row, fixed, pivot, -direction[index])
        self._value = self._turned(self._value, fixed, pivot, gain)
        self._determinant, self._columns[leaving] = pivot, column

    def _turned(self, row: list[int], fixed: list[int], pivot: int, factor: int) -> list[int]:
        if not factor and pivot == self._determinant:
            return row
        old = self._determinant
        return [(one * pivot + other * factor) // old for one, other in zip(row, fixed, strict=True)]

    def _leaving(self, direction: Sequence[int]) -> int:
        """The row that is lexicographically least when divided by its part of the direction."""
        best = -1
        for index, factor in enumerate(direction):
            if factor <= 0:
                continue
            if best < 0:
                best = index
                continue
            for one, other in zip(self._rows[index], self._rows[best], strict=True):
                left, right = one * direction[best], other * factor
                if left != right:
                    best = index if left < right else best
                    break
        assert best >= 0, "every tree has a link, and every link a capacity"
        return best
