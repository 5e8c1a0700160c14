"""Trees as spreads: a chunk goes from the root down, in the step that is its sender's depth.

All that is made of trees (binary, double, packed) is this, several times over: up a tree backwards, down it forwards,
chunk after chunk, each one step behind the one before. The edges to a node's first, second ... child have lanes of
their own, and what goes down has others than what comes up, for they may be different cables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.schedule.checker import prove
from psctl.schedule.reverse import backwards
from psctl.schedule.spread import Transfers, moved, steps_of
from psctl.schedule.transfer import Schedule, Transfer

Edges = tuple[tuple[int, int], ...]
"""(parent, child) of each edge."""

Tree = tuple[int, Edges, int]
"""Root, edges, and weight: the share of the bytes, a whole number."""


def down(root: int, edges: Edges) -> Transfers:
    """Return the transfers of one chunk from the root to all nodes of a tree.

    Raises:
        ValueError: the edges are no tree with this root; the caller's fault.
    """
    depth, places, found, waiting = {root: 0}, dict.fromkeys((parent for parent, _ in edges), 0), [], list(edges)
    while waiting:
        ready = [(parent, child) for parent, child in waiting if parent in depth]
        if not ready:
            raise ValueError(f"node {waiting[0][0]} is not reached from the root {root}: no tree")
        for parent, child in ready:
            if child in depth:
                raise ValueError(f"node {child} is reached twice: no tree")
            depth[child] = depth[parent] + 1
            found.append(Transfer(depth[parent], parent, child, 0, "copy", places[parent]))
            places[parent] += 1
        waiting = [edge for edge in waiting if edge not in ready]
    return found


def pipelined(
    name: str, world: int, trees: Sequence[Tree], chunks: int, params: Mapping[str, object] | None = None
) -> Schedule:
    """Return the all-reduce over trees side by side, each with its part of the bytes in `chunks` chunks.

    Args:
        name: as users know the algorithm.
        world: number of ranks.
        trees: each spans all ranks.
        chunks: chunks of one tree's part.
        params: what was chosen, for people.

    Raises:
        ValueError: an edge list is no tree, or a number is below 1; the caller's fault.
    """
    if chunks < 1 or not trees or any(weight < 1 for _, _, weight in trees):
        raise ValueError(f"{name}: at least one tree, one chunk, and positive weights")
    transfers: Transfers = []
    shares: list[int] = []
    lanes = 0
    for root, edges, weight in trees:
        there = down(root, edges)
        wide = 1 + max((one.lane for one in there), default=0)
        up = backwards(there)
        both = [*up, *moved(there, step=steps_of(up), lane=wide)]
        for chunk in range(chunks):
            transfers += moved(both, step=chunk, chunk=len(shares) + chunk, lane=lanes)
        shares += [weight] * chunks
        lanes += 2 * wide
    return prove(name, "all-reduce", world, transfers, shares, params={**(params or {}), "chunks": chunks})


def broadcast(root: int, edges: Edges, chunks: int) -> Transfers:
    """Return the pipelined broadcast of `chunks` chunks down one tree."""
    there = down(root, edges)
    return [one for chunk in range(chunks) for one in moved(there, step=chunk, chunk=chunk)]
