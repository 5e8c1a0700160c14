"""Packs spanning trees into the direct links of a set of GPUs (Blink, MLSys 2020).

For a broadcast, each direction of a link counts separately: the number of trees from the root is the minimum, over all
other devices, of the maximum flow from the root (Edmonds). They are found by removing one tree after another such that
the flows decrease no faster than trees are removed, which is always possible (Lovász 1976). For an all-reduce, a tree
of weight w reduces to its root over one direction of its links and broadcasts from it over the other, so that links
count once: the total weight is at most the graph's strength. Module `strength` divides each link's units between its
directions such that a broadcast reaches the strength; its trees are the packing. The arithmetic is exact, in whole
parts of a link unit (1 / the strength's denominator). Trees carry bytes in proportion to their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import msgspec

from psctl.grouping import grouped
from psctl.topology.algorithms.direct_links import DirectLinks
from psctl.topology.algorithms.flows import flow
from psctl.topology.algorithms.strength import directed, strength

LinkSet = frozenset[int]
"""A tree: the indices of its links."""

Edges = tuple[tuple[int, int], ...]
"""From the root outwards: (parent, child)."""

TRIED = 8
"""Number of devices up to which all are tried as roots."""


class PackedTree(msgspec.Struct, frozen=True):
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


class TreePacking(msgspec.Struct, frozen=True):
    """Trees, the heaviest first. `bound` is the maximum weight of any packing, `unit` the bytes/s of a link unit."""

    trees: tuple[PackedTree, ...]
    bound: Fraction
    unit: float

    @property
    def total(self) -> Fraction:
        """Link units of all trees together; times `unit`, the bytes/s of the packing."""
        return sum((tree.weight for tree in self.trees), Fraction())

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the bytes for each tree."""
        return tuple(float(tree.weight / self.total) for tree in self.trees)


def all_reduce(wires: DirectLinks) -> TreePacking:
    """Pack trees for an all-reduce.

    Args:
        wires: devices and their direct links.

    Returns:
        Trees over all devices, rooted at their middle; none where the links do not connect all devices. The total is
        the bound.
    """
    if len(wires.nodes) < 2 or not wires.links or not wires.connected:
        return TreePacking((), Fraction(), wires.unit)
    bound, _ = strength(wires)
    found = _complete(wires) or _reaching(wires, bound)
    trees = [_rooted(wires, links, weight) for links, weight in found.items()]
    return TreePacking(tuple(sorted(trees, key=lambda tree: (-tree.weight, tree.depth, tree.edges))), bound, wires.unit)


def _complete(wires: DirectLinks) -> dict[LinkSet, Fraction] | None:
    """Return the stars around all devices of a complete graph with equal links, units / 2 each; None for others."""
    count, sizes = len(wires.nodes), {units for _, _, units in wires.links}
    if len(sizes) != 1 or len(wires.links) != count * (count - 1) // 2 or count < 3:
        return None
    stars = [frozenset(at for at, link in enumerate(wires.links) if node in link[:2]) for node in range(count)]
    return dict.fromkeys(stars, Fraction(sizes.pop(), 2))


def _reaching(wires: DirectLinks, bound: Fraction) -> dict[LinkSet, Fraction]:
    """Return trees whose weights add up to the bound, from the root that needs the fewest trees."""
    index = {pair: at for at, (a, b, _) in enumerate(wires.links) for pair in ((a, b), (b, a))}
    best: dict[LinkSet, Fraction] = {}
    for root in range(len(wires.nodes) if len(wires.nodes) <= TRIED else 1):
        _, trees = trees_from(directed(wires, bound, root), root)
        found: dict[LinkSet, Fraction] = {}
        for edges, weight in trees.items():
            links = frozenset(index[edge] for edge in edges)
            found[links] = found.get(links, Fraction()) + Fraction(weight, bound.denominator)
        if not best or len(found) < len(best):
            best = found
    return best


def _rooted(wires: DirectLinks, links: Iterable[int], weight: Fraction) -> PackedTree:
    """Return the tree, rooted at the lowest of the devices that give the smallest depth."""
    ends = (wires.links[at][:2] for at in sorted(links))
    near = grouped(way for a, b in ends for way in ((a, b), (b, a)))
    walks = [_walk(near, root) for root in sorted(near)]
    _, root, edges = min((depth, root, edges) for depth, root, edges in walks)
    return PackedTree(wires.nodes[root], tuple((wires.nodes[a], wires.nodes[b]) for a, b in edges), weight)


def _walk(near: dict[int, list[int]], root: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Return depth, root, and the edges outwards from the root."""
    far, queue, edges = {root: 0}, [root], []
    for node in queue:
        for other in near[node]:
            if other not in far:
                far[other] = far[node] + 1
                edges.append((node, other))
                queue.append(other)
    return max(far.values()), root, edges


def trees_from(table: list[list[int]], root: int) -> tuple[int, dict[Edges, int]]:
    """Return the minimum of the maximum flows from a root, and trees from it with whole weights that sum to it.

    Args:
        table: units from each device to each other.
        root: the root of the trees.
    """
    left = [row.copy() for row in table]
    others = [node for node in range(len(left)) if node != root]
    bound = reach = min((flow(left, root, node)[0] for node in others), default=0)
    trees: dict[Edges, int] = {}
    while reach:
        edges = _outwards(left, root, reach)
        weight = _heaviest(left, edges, root, reach)
        for a, b in edges:
            left[a][b] -= weight
        reach -= weight
        trees[edges] = trees.get(edges, 0) + weight
    return bound, trees


def _outwards(left: list[list[int]], root: int, reach: int) -> Edges:
    """Return a tree from the root such that the remaining units still carry reach - 1 to every device.

    The tree grows breadth first, over wide links first. An arc reduces only cuts between the root and its end, so one
    flow determines whether it may be taken.
    """
    rest = [row.copy() for row in left]
    edges: list[tuple[int, int]] = []
    inside = [root]
    while len(inside) < len(left):
        a, b = _safe(rest, root, inside, reach)
        rest[a][b] -= 1
        edges.append((a, b))
        inside.append(b)
    return tuple(edges)


def _safe(rest: list[list[int]], root: int, inside: Sequence[int], reach: int) -> tuple[int, int]:
    outside = set(range(len(rest))) - set(inside)
    for a in inside:
        for b in sorted((node for node in outside if rest[a][node] > 0), key=lambda node: -rest[a][node]):
            rest[a][b] -= 1
            enough = flow(rest, root, b, reach - 1)[0] >= reach - 1
            rest[a][b] += 1
            if enough:
                return a, b
    raise AssertionError("by Lovász's proof of Edmonds' theorem some arc is safe")


def _heaviest(left: list[list[int]], edges: Edges, root: int, reach: int) -> int:
    """Return how often a tree can be removed such that the flow to every device decreases by only as much.

    A cut that the tree crosses t times allows (its units - reach) / (t-1); each violated cut lowers the weight.
    """
    weight = min(reach, *(left[a][b] for a, b in edges))
    for _, node in edges:
        while weight > 1:
            rest = [row.copy() for row in left]
            for a, b in edges:
                rest[a][b] -= weight
            carried, side = flow(rest, root, node, reach - weight)
            if carried >= reach - weight:
                break
            units = sum(left[a][b] for a in side for b in range(len(left)) if b not in side)
            crossed = sum(a in side and b not in side for a, b in edges)
            weight = max(1, (units - reach) // (crossed - 1))
    return weight
