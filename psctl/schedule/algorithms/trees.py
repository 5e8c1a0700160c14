"""All-reduces over trees: chunks are added on the way up to the root and copied on the way down.

    tree               binomial: in every round each rank that has the vector sends it to one that has not, so the
                       senders double; whole vector, 2 ceil(lg p) (alpha + N beta)
    chain              from rank to rank, whole vector: only one link is busy at any time, 2(p-1)(alpha + N beta); the
                       slowest of the textbooks' algorithms
    pipelined-chain    the chain with the vector in k chunks, so that all links are busy at once: (p-2+k)(alpha +
                       N beta/k) each way, best with k = sqrt((p-2) N beta/alpha); a chunk goes back as soon as it is
                       summed, so on full-duplex links the way back costs only the p-1 steps after the last chunk
    pipelined-tree     a balanced binary tree: an inner rank receives two vectors and sends one on the way up, the
                       reverse on the way down, so a port carries 3N each way; depth lg p
    double-tree        two binary trees with half of the bytes each; no rank has children in both (Sanders, Speck and
                       Traeff 2009; NCCL 2.4). In one binary tree half of the ranks are leaves and their ports idle; the
                       second tree makes them its inner ranks: 2 lg p alpha + 2 N beta + O(sqrt(alpha beta N lg p)).
                       With an odd number of ranks rank 0 has a child in both
    packed-trees       as many spanning trees as the links can carry, each with bytes in proportion to its weight
                       (Blink, MLSys 2020); topology/algorithms/trees.py finds them. Where no ring visits all GPUs of a
                       job over fast links, trees still may

All but `tree` are pipelines of trees (`pipelined`): chunk after chunk, each one step behind the one before. The edges
to a node's first, second ... child have lanes of their own, and what goes down has others than what comes up, because
they may be different cables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from psctl.schedule.checker import prove
from psctl.schedule.phases import AllGather, Transfers, all_reduce, lane_count, reverse, shifted, step_count
from psctl.schedule.schedule import Schedule, Transfer

Edges = tuple[tuple[int, int], ...]
"""(parent, child) of each edge."""

WeightedTree = tuple[int, Edges, int]
"""Root, edges, and weight: the share of the bytes, a whole number."""


def binomial_rounds(world: int) -> list[list[tuple[int, int, int]]]:
    """Return for each round its edges (sender, receiver, end): the receiver's subtree is the ranks up to `end`.

    The largest distance comes first, so that the ranks below each rank are neighbours.
    """
    top = (world - 1).bit_length()
    return [
        [(rank, rank + distance, min(rank + 2 * distance, world)) for rank in range(0, world - distance, 2 * distance)]
        for distance in (1 << bit for bit in reversed(range(top)))
    ]


def binomial_broadcast(world: int) -> AllGather:
    """Return the broadcast of one chunk from rank 0 over a binomial tree."""
    transfers = [
        Transfer(step, parent, child, 0, "copy")
        for step, edges in enumerate(binomial_rounds(world))
        for parent, child, _ in edges
    ]
    return AllGather((0,), transfers, (1,), world)


def chain_edges(world: int, order: Sequence[int] | None = None) -> tuple[int, Edges]:
    """Return the chain as a tree: its root, the first rank, and an edge from each rank to the next."""
    ranks = tuple(order or range(world))
    return ranks[0], tuple(pairwise(ranks))


def binary_edges(world: int, order: Sequence[int] | None = None) -> tuple[int, Edges]:
    """Return the tree in which the rank at place i has those at 2i+1 and 2i+2 below it, and its root."""
    ranks = tuple(order or range(world))
    return ranks[0], tuple((ranks[(child - 1) // 2], ranks[child]) for child in range(1, world))


def odd_leaves_edges(world: int) -> tuple[int, Edges]:
    """Return the first tree of a double tree: odd ranks are its leaves, and rank 0, its root, has one child.

    A rank's parent follows from its lowest set bit b: b cleared and 2b set; where there is no such rank, b cleared.
    """
    found = []
    for rank in range(1, world):
        bit = rank & -rank
        parent = (rank ^ bit) | 2 * bit
        found.append((parent if parent < world else rank ^ bit, rank))
    return 0, tuple(found)


def double_trees(world: int, order: Sequence[int] | None = None) -> tuple[WeightedTree, WeightedTree]:
    """Return both trees, of equal weight: the second is the first with every rank called by the next one's number."""
    ranks = tuple(order or range(world))
    root, edges = odd_leaves_edges(world)

    def labelled(names: Sequence[int]) -> WeightedTree:
        return names[root], tuple((names[parent], names[child]) for parent, child in edges), 1

    return labelled(ranks), labelled([ranks[(rank + 1) % world] for rank in range(world)])


def tree(world: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce up and down a binomial tree; `order`: the ranks by their place in the tree, root first."""
    params = {"order": list(order or range(world))}
    return all_reduce("tree", world, binomial_broadcast(world).reordered(order), params=params)


def chain(world: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce along a chain in one piece; the first rank of `order` adds last."""
    return pipelined("chain", world, [(*chain_edges(world, order), 1)], 1, order)


def pipelined_chain(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce along a chain, chunk behind chunk; the first rank of `order` adds last."""
    return pipelined("pipelined-chain", world, [(*chain_edges(world, order), 1)], chunks, order)


def pipelined_tree(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce over one binary tree; `order`: the ranks by their place in it, level by level."""
    return pipelined("pipelined-tree", world, [(*binary_edges(world, order), 1)], chunks, order)


def double_tree(world: int, chunks: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the all-reduce over two binary trees; `chunks` of each half; `order`: as in the first tree."""
    return pipelined("double-tree", world, double_trees(world, order), chunks, order)


def packed_trees(world: int, trees: Sequence[WeightedTree], chunks: int) -> Schedule:
    """Return the all-reduce over trees that each span all ranks, each tree's part in `chunks` chunks."""
    params = {"roots": [root for root, _, _ in trees], "weights": [weight for _, _, weight in trees]}
    return pipelined("packed-trees", world, trees, chunks, params=params)


def rooted(root: int, edges: Edges) -> Edges:
    """Return a tree's edges from another root outwards.

    Raises:
        ValueError: they do not connect the root with all nodes; the caller's fault.
    """
    found, reached, left = [], [root], list(edges)
    for parent in reached:
        for edge in [one for one in left if parent in one]:
            left.remove(edge)
            child = edge[1] if edge[0] == parent else edge[0]
            found.append((parent, child))
            reached.append(child)
    if left:
        raise ValueError(f"node {left[0][0]} is not connected with the root {root}: no tree")
    return tuple(found)


def broadcast(root: int, edges: Edges) -> Transfers:
    """Return the transfers of one chunk from the root to all nodes of a tree, in the step that is its sender's depth.

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
    name: str,
    world: int,
    trees: Sequence[WeightedTree],
    chunks: int,
    order: Sequence[int] | None = None,
    params: Mapping[str, object] | None = None,
) -> Schedule:
    """Return the all-reduce over trees side by side, each with its part of the bytes in `chunks` chunks.

    Args:
        name: the algorithm's name in job files and output.
        world: number of ranks.
        trees: each spans all ranks.
        chunks: chunks of one tree's part.
        order: the ranks by their place, for `params`.
        params: the options, for output; the order when None.

    Raises:
        ValueError: an edge list is no tree, or a number is below 1; the caller's fault.
    """
    if chunks < 1 or not trees or any(weight < 1 for _, _, weight in trees):
        raise ValueError(f"{name}: at least one tree, one chunk, and positive weights")
    transfers: Transfers = []
    shares: list[int] = []
    lanes = 0
    for root, edges, weight in trees:
        down = broadcast(root, edges)
        up, width = reverse(down), lane_count(down)
        both = [*up, *shifted(down, step=step_count(up), lane=width)]
        for chunk in range(chunks):
            transfers += shifted(both, step=chunk, chunk=len(shares) + chunk, lane=lanes)
        shares += [weight] * chunks
        lanes += 2 * width
    chosen = {"order": list(order or range(world))} if params is None else params
    return prove(name, world, transfers, shares, params={**chosen, "chunks": chunks})
