"""Packed spanning trees: as much as the direct links of a set of GPUs can carry, rings or not (Blink, MLSys 2020).

For an all-reduce, a tree of weight w reduces to its root over one direction of its links and spreads from it over the
other, so links count once whatever the direction: the trees together carry at most the graph's strength (module
`strength`), and a packing that reaches it is found by a linear program with whole numbers (module `packing`). For a
broadcast, each direction of a link counts by itself: as many trees leave the root as the least of the greatest flows
from it to any other device (Edmonds), found by taking off one tree after another so that the flows fall no faster than
the trees are taken (Lovász). The weights are link units; bytes go to the trees in proportion to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import msgspec

from psctl.topology.flows import flow
from psctl.topology.packing import Columns, among, pack
from psctl.topology.strength import strength
from psctl.topology.wires import Wires


class Tree(msgspec.Struct, frozen=True):
    """A tree over all devices: its edges (parent, child) from the root outwards, and its weight in link units."""

    root: str
    edges: tuple[tuple[str, str], ...]
    weight: Fraction

    @property
    def depth(self) -> int:
        """Links between the root and the device farthest from it."""
        far = {self.root: 0}
        for parent, child in self.edges:
            far[child] = far[parent] + 1
        return max(far.values())


class Packing(msgspec.Struct, frozen=True):
    """Trees, the heaviest first. `bound` is what no packing exceeds; `unit` what a link unit carries, bytes/s."""

    trees: tuple[Tree, ...]
    bound: Fraction
    unit: float

    @property
    def total(self) -> Fraction:
        """Link units of all trees together: bytes/s through the packing are this times `unit`."""
        return sum((tree.weight for tree in self.trees), Fraction())

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the bytes for each tree."""
        return tuple(float(tree.weight / self.total) for tree in self.trees)


def all_reduce(wires: Wires, most: int | None = None) -> Packing:
    """Pack trees for an all-reduce.

    Args:
        wires: devices and their direct links.
        most: use no more trees than this; None for as many as it takes to reach the bound, which is never more than
            there are links.

    Returns:
        Trees over all devices, rooted at their middle; none where the links don't join all devices. The total is the
        bound unless `most` stands in the way.
    """
    if len(wires.nodes) < 2 or not wires.links or not wires.connected:
        return Packing((), Fraction(), wires.unit)
    bound, _ = strength(wires)
    units = [count for _, _, count in wires.links]
    found = _complete(wires) or pack(units, lambda prices: _cheapest(wires, prices), bound)
    if most is not None:
        found = _fewer(units, found, most)
    trees = [_rooted(wires, links, weight) for links, weight in found.items()]
    return Packing(tuple(sorted(trees, key=lambda tree: (-tree.weight, tree.depth, tree.edges))), bound, wires.unit)


def broadcast(wires: Wires, root: str) -> Packing:
    """Pack trees that all start at one device.

    Args:
        wires: devices and their direct links, each with its units in both directions.
        root: the device that has what all others need.

    Returns:
        Trees with whole weights; their total is the bound. None where the links don't join all devices.
    """
    source = wires.nodes.index(root)
    left = wires.units()
    others = [node for node in range(len(left)) if node != source]
    reach = min((flow(left, source, node)[0] for node in others), default=0)
    bound = Fraction(reach)
    trees: dict[tuple[tuple[int, int], ...], int] = {}
    while reach:
        edges = _outwards(left, source, reach)
        weight = _heaviest(left, edges, source, reach)
        for a, b in edges:
            left[a][b] -= weight
        reach -= weight
        trees[tuple(edges)] = trees.get(tuple(edges), 0) + weight
    named = [_named(wires, source, edges, Fraction(weight)) for edges, weight in trees.items()]
    return Packing(tuple(sorted(named, key=lambda tree: (-tree.weight, tree.depth, tree.edges))), bound, wires.unit)


def _complete(wires: Wires) -> dict[Columns, Fraction] | None:
    """Of a complete graph with equal links: the star around each device, c/2 each; None for others."""
    count, sizes = len(wires.nodes), {units for _, _, units in wires.links}
    if len(sizes) != 1 or len(wires.links) != count * (count - 1) // 2 or count < 3:
        return None
    stars = [frozenset(at for at, link in enumerate(wires.links) if node in link[:2]) for node in range(count)]
    return dict.fromkeys(stars, Fraction(sizes.pop(), 2))


def _cheapest(wires: Wires, prices: Sequence[int]) -> Columns:
    """Kruskal: the links by their price, the widest of equal ones first, unless both ends are joined already."""
    label = list(range(len(wires.nodes)))
    tree = []
    for at in sorted(range(len(prices)), key=lambda at: (prices[at], -wires.links[at][2], at)):
        a, b, _ = wires.links[at]
        old, new = label[a], label[b]
        if old != new:
            label = [new if one == old else one for one in label]
            tree.append(at)
    return frozenset(tree)


def _fewer(units: Sequence[int], found: dict[Columns, Fraction], most: int) -> dict[Columns, Fraction]:
    """Leave out the tree with the least weight, weigh the others anew, until few enough are left."""
    while len(found) > max(1, most):
        lightest = min(found, key=lambda tree: (found[tree], sorted(tree)))
        found = among(units, [tree for tree in found if tree != lightest])
    return found


def _rooted(wires: Wires, links: Iterable[int], weight: Fraction) -> Tree:
    """The tree from the device with the fewest steps to the farthest, the lowest of these."""
    near: dict[int, list[int]] = {}
    for at in sorted(links):
        a, b, _ = wires.links[at]
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    walks = [_walk(near, root) for root in sorted(near)]
    _, root, edges = min((depth, root, edges) for depth, root, edges in walks)
    return _named(wires, root, edges, weight)


def _walk(near: dict[int, list[int]], root: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Depth, root, and edges outwards."""
    far, queue, edges = {root: 0}, [root], []
    for node in queue:
        for other in near[node]:
            if other not in far:
                far[other] = far[node] + 1
                edges.append((node, other))
                queue.append(other)
    return max(far.values()), root, edges


def _named(wires: Wires, root: int, edges: Iterable[tuple[int, int]], weight: Fraction) -> Tree:
    return Tree(wires.nodes[root], tuple((wires.nodes[a], wires.nodes[b]) for a, b in edges), weight)


def _outwards(left: Sequence[Sequence[int]], source: int, reach: int) -> list[tuple[int, int]]:
    """A tree from the source such that what remains still carries reach - 1 to every device.

    Breadth first; an arc may be taken when no cut that it crosses is left with less. Only cuts with its end on the far
    side and its start on the near side lose by it, so one flow tells.
    """
    rest = [list(row) for row in left]
    edges: list[tuple[int, int]] = []
    inside = [source]
    while len(inside) < len(left):
        edges.append(_safe(rest, source, inside, reach))
        a, b = edges[-1]
        rest[a][b] -= 1
        inside.append(b)
    return edges


def _safe(rest: list[list[int]], source: int, inside: Sequence[int], reach: int) -> tuple[int, int]:
    for a in inside:
        for b in sorted(set(range(len(rest))) - set(inside), key=lambda node: -rest[a][node]):
            if rest[a][b] <= 0:
                continue
            rest[a][b] -= 1
            kept, rest[source][a] = rest[source][a], rest[source][a] + reach
            enough = flow(rest, source, b, reach - 1)[0] >= reach - 1
            rest[source][a] = kept
            rest[a][b] += 1
            if enough:
                return a, b
    raise AssertionError("by Lovász's proof of Edmonds' theorem some arc is safe")


def _heaviest(left: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]], source: int, reach: int) -> int:
    """How often the tree can be taken while what remains carries as much less to every device as was taken."""
    for weight in range(min(reach, *(left[a][b] for a, b in edges)), 1, -1):
        rest = [list(row) for row in left]
        for a, b in edges:
            rest[a][b] -= weight
        if all(flow(rest, source, b, reach - weight)[0] >= reach - weight for _, b in edges):
            return weight
    return 1
