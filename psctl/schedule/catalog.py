"""The strategies by their names: from a name and what it needs to a proven schedule.

Everything that a builder needs of the machines comes in as plain tuples (`Options`), so this room knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from psctl.errors import UsageError
from psctl.schedule import cpu, halving_doubling, one_shot, ring, root, sharded
from psctl.schedule.transfer import Schedule

Ring = tuple[tuple[int, ...], int]
"""Order of the ranks round it, and its weight."""

Tree = tuple[int, tuple[tuple[int, int], ...], int]
"""Root, edges (parent, child), weight."""


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
        groups: the ranks of each group (hierarchical).
        inner: strategy within a group.
        outer: strategy between groups.
        servers: nodes that serve, ranks or helpers from `world` on (ps).
        shares: share of each server; equal when empty.
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
    servers: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()


Builder = Callable[[int, Options], Schedule]


def builders() -> Mapping[str, Builder]:
    """Return the builder of each strategy that is a schedule: all but `native`, which is the engine's own."""
    return {
        "root": lambda world, given: root.build(world, given.root),
        "cpu": lambda world, given: cpu.build(world),
        "sharded": lambda world, given: sharded.build(world, given.weights or None, given.pieces, given.paced),
        "one-shot": lambda world, given: one_shot.build(world),
        "ring": lambda world, given: ring.build(world, given.order or None, given.pieces),
        "bidirectional-ring": lambda world, given: ring.bidirectional(world, given.order or None, given.pieces),
        "multi-ring": lambda world, given: ring.multi_ring(world, given.rings, given.pieces),
        "halving-doubling": lambda world, given: halving_doubling.build(world),
    }


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
    return known[strategy](world, options or Options())
