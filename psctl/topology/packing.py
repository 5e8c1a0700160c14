"""The heaviest packing of trees into capacities, by the simplex method on whole numbers with trees made as needed.

max sum w(T) such that the trees over each link weigh no more than its units together. The dual gives each link a
price; a tree whose links cost less than 1 together would make the packing heavier, and the cheapest spanning tree tells
whether there is one (column generation). The basis' inverse is kept as whole numbers over one determinant (Edmonds,
Bareiss), so nothing is rounded; the lexicographic rule keeps it from going round in circles. A basic solution has no
more trees than there are links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

Columns = frozenset[int]
"""A tree: the indices of its links."""

Oracle = Callable[[Sequence[int]], Columns]
"""Returns a tree of least price; prices are those of the links, all times one positive number."""

FINENESS = 5040
"""Use is told apart by this part of a unit; most numbers of units divide it."""


def pack(units: Sequence[int], cheapest: Oracle, enough: Fraction | None = None) -> dict[Columns, Fraction]:
    """Return the trees of a heaviest packing and their weights.

    Args:
        units: of each link, greater than 0.
        cheapest: finds a tree of least price.
        enough: weight that no packing can exceed; the search ends as soon as it is met.
    """
    basis = _Basis(units)
    for tree in _spread(units, cheapest):
        if sum(basis.prices[link] for link in tree) < basis.determinant:
            basis.enter(tree)
    while enough is None or basis.total < enough:
        prices = basis.prices
        lowest = min(range(len(units)), key=prices.__getitem__)
        if prices[lowest] < 0:
            basis.enter(lowest)
            continue
        tree = cheapest(prices)
        if sum(prices[link] for link in tree) >= basis.determinant:
            break
        basis.enter(tree)
    return basis.weights()


def _spread(units: Sequence[int], cheapest: Oracle) -> list[Columns]:
    """Trees to begin with: each over the links that those before used least. Most steps of the search are saved."""
    used = [0] * len(units)
    found = []
    for _ in range(2 * len(units)):
        tree = cheapest([used[at] * FINENESS // count for at, count in enumerate(units)])
        for link in tree:
            used[link] += 1
        found.append(tree)
    return list(dict.fromkeys(found))


def among(units: Sequence[int], trees: Sequence[Columns]) -> dict[Columns, Fraction]:
    """Return the weights of a heaviest packing of some trees alone."""
    return pack(units, lambda prices: min(trees, key=lambda tree: sum(prices[link] for link in tree)))


class _Basis:
    """Rows of (units in use | inverse), all times the determinant. A column is a tree, or an index: units left over."""

    def __init__(self, units: Sequence[int]) -> None:
        size = range(len(units))
        self.determinant = 1
        self._rows = [[units[row], *(int(row == column) for column in size)] for row in size]
        self._columns: list[Columns | int] = list(size)

    @property
    def prices(self) -> list[int]:
        """Of each link, times the determinant."""
        trees = [row for row, column in zip(self._rows, self._columns, strict=True) if not isinstance(column, int)]
        return [sum(row[at] for row in trees) for at in range(1, len(self._rows) + 1)]

    @property
    def total(self) -> Fraction:
        """Weight of all trees."""
        return sum(self.weights().values(), Fraction())

    def weights(self) -> dict[Columns, Fraction]:
        """Return the trees of the basis that have a weight."""
        found: Mapping[Columns | int, int] = {
            column: row[0] for row, column in zip(self._rows, self._columns, strict=True) if row[0]
        }
        return {tree: Fraction(weight, self.determinant) for tree, weight in found.items() if not isinstance(tree, int)}

    def enter(self, column: Columns | int) -> None:
        """Put a column into the basis, in place of the first that it drives to nothing."""
        at = [column + 1] if isinstance(column, int) else [link + 1 for link in column]
        direction = [sum(row[one] for one in at) for row in self._rows]
        leaving = self._leaving(direction)
        pivot, fixed = direction[leaving], self._rows[leaving]
        for index, row in enumerate(self._rows):
            factor = direction[index]
            if index != leaving:
                self._rows[index] = [
                    (one * pivot - other * factor) // self.determinant for one, other in zip(row, fixed, strict=True)
                ]
        self.determinant = pivot
        self._columns[leaving] = column

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
