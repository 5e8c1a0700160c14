"""The strategies by their names: from a name and what it needs to a proven schedule.

Everything that a builder needs of the machines comes in as plain tuples (`Options`), so this room knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from psctl.errors import UsageError
from psctl.schedule.algorithms import (
    binomial,
    chain,
    cpu,
    double_tree,
    halving_doubling,
    hierarchical,
    one_shot,
    packed_trees,
    pipelined_chain,
    pipelined_tree,
    recursive_doubling,
    ring,
    root,
    sharded,
    star,
)
from psctl.schedule.transfer import Schedule
from psctl.schedule.tree_spreads import Tree

Ring = tuple[tuple[int, ...], int]
"""Order of the ranks round it, and its weight."""


class Options(msgspec.Struct, frozen=True):
    """What a strategy may be told; each takes what it knows and leaves the rest.

    Args:
        root: rank that gathers (root).
        order: the ranks in the order of chain, ring or tree; as numbered when empty.
        chunks: chunks of a pipeline (pipelined-chain, pipelined-tree, double-tree, packed-trees).
        pieces: cut what has phases so often (sharded, ring, hierarchical, ps).
        weights: share of each rank (sharded); equal when empty.
        paced: one peer at a time (sharded).
        rings: rings with weights (multi-ring).
        trees: packed trees.
        groups: the ranks of each group (hierarchical); those that share a host and push together (ps).
        inner: strategy within a group.
        outer: strategy between groups; hierarchical again for a third level.
        across: what the outer strategy is told.
        helpers: further nodes that may serve; with no `servers` named, ranks and helpers share as BytePS does (ps).
        servers: nodes that serve, ranks or helpers from `world` on (ps).
        shares: share of each server; equal when empty.
        near: the group of each server's own host, by index, or -1 (ps with groups).
    """

    root: int = 0
    order: tuple[int, ...] = ()
    chunks: int = 8
    pieces: int = 1
    weights: tuple[int, ...] = ()
    paced: bool = False
    rings: tuple[Ring, ...] = ()
    trees: tuple[Tree, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    inner: str = "ring"
    outer: str = "ring"
    across: Options | None = None
    helpers: int = 0
    servers: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    near: tuple[int, ...] = ()


Builder = Callable[[int, Options], Schedule]


def builders() -> Mapping[str, Builder]:
    """Return the builder of each strategy that is a schedule: all but `native`, which is the engine's own."""
    return {
        "root": lambda world, given: root.build(world, given.root),
        "cpu": lambda world, given: cpu.build(world),
        "sharded": lambda world, given: sharded.build(world, given.weights or None, given.pieces, given.paced),
        "one-shot": lambda world, given: one_shot.build(world),
        "chain": lambda world, given: chain.build(world, given.order or None),
        "pipelined-chain": lambda world, given: pipelined_chain.build(world, given.chunks, given.order or None),
        "ring": lambda world, given: ring.build(world, given.order or None, given.pieces),
        "bidirectional-ring": lambda world, given: ring.bidirectional(world, given.order or None, given.pieces),
        "multi-ring": lambda world, given: ring.multi_ring(world, given.rings, given.pieces),
        "tree": lambda world, given: binomial.build(world, given.order or None),
        "pipelined-tree": lambda world, given: pipelined_tree.build(world, given.chunks, given.order or None),
        "double-tree": lambda world, given: double_tree.build(world, given.chunks, given.order or None),
        "packed-trees": lambda world, given: packed_trees.build(world, given.trees, given.chunks),
        "recursive-doubling": lambda world, given: recursive_doubling.build(world),
        "halving-doubling": lambda world, given: halving_doubling.build(world),
        "hierarchical": _hierarchical,
        "ps": _ps,
    }


def _hierarchical(world: int, given: Options) -> Schedule:
    outer = build(given.outer, len(given.groups), given.across)
    return hierarchical.build(world, given.groups, outer, given.inner, given.pieces)


def _ps(world: int, given: Options) -> Schedule:
    if given.servers:
        return star.build(world, given.servers, given.shares or None, given.pieces, given.groups, given.near)
    servers, shares = star.split(world, given.helpers)
    return star.build(world, servers, shares, given.pieces)


def build(strategy: str, world: int, options: Options | None = None) -> Schedule:
    """Return the proven all-reduce of a strategy.

    Args:
        strategy: one of `words.STRATEGIES` but `native`.
        world: number of ranks.
        options: what the strategy may be told.

    Raises:
        UsageError: no schedule has this name; the caller's fault.
        ValueError: what it was told does not fit the world; the caller's fault.
    """
    known = builders()
    if strategy not in known:
        raise UsageError(f"no schedule is called {strategy!r}", hint=f"one of: {', '.join(known)}")
    given = options or Options()
    if given.order and sorted(given.order) != list(range(world)):
        raise ValueError(f"an order names each of the {world} ranks once, not {list(given.order)}")
    return known[strategy](world, given)
