"""Schedules by the names of their strategies.

Builders are independent of machines: they receive the parts of a topology that they need as tuples (`ScheduleOptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from psctl.errors import UsageError
from psctl.schedule.algorithms.doubling import halving_doubling, recursive_doubling
from psctl.schedule.algorithms.hierarchical import hierarchical
from psctl.schedule.algorithms.parameter_server import balanced_shares, parameter_server
from psctl.schedule.algorithms.ring import bidirectional, multi_ring, ring
from psctl.schedule.algorithms.root import through_cpu, through_rank
from psctl.schedule.algorithms.sharded import one_shot, sharded
from psctl.schedule.algorithms.trees import (
    WeightedTree,
    chain,
    double_tree,
    packed_trees,
    pipelined_chain,
    pipelined_tree,
    tree,
)
from psctl.schedule.schedule import Schedule

WeightedRing = tuple[tuple[int, ...], int]
"""Order of the ranks round it, and its weight."""


class ScheduleOptions(msgspec.Struct, frozen=True):
    """Options of all strategies; each uses its own and ignores the rest.

    Args:
        root: rank that gathers (root).
        order: the ranks in the order of chain, ring or tree; as numbered when empty.
        chunks: chunks of a pipeline (pipelined-chain, pipelined-tree, double-tree, packed-trees).
        pieces: number of parts of which the phases overlap (sharded, ring, hierarchical, ps).
        weights: share of each rank (sharded); equal when empty.
        paced: one peer at a time (sharded).
        rings: rings with weights (multi-ring).
        trees: packed trees.
        groups: the ranks of each group (hierarchical); ranks that share a host and push together (ps).
        inner: strategy within a group.
        outer: strategy between groups; hierarchical again for a third level.
        across: options of the outer strategy.
        helpers: further nodes that may serve; with no `servers` named, ranks and helpers share as BytePS does (ps).
        servers: nodes that serve, ranks or helpers from `world` on (ps).
        shares: share of each server; equal when empty.
        near: the group of each server's own host or rack, by index, or -1 (ps with groups).
        forwarded: groups are racks, in which one rank pulls for the others (ps with groups).
    """

    root: int = 0
    order: tuple[int, ...] = ()
    chunks: int = 8
    pieces: int = 1
    weights: tuple[int, ...] = ()
    paced: bool = False
    rings: tuple[WeightedRing, ...] = ()
    trees: tuple[WeightedTree, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    inner: str = "ring"
    outer: str = "ring"
    across: ScheduleOptions | None = None
    helpers: int = 0
    servers: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    forwarded: bool = False


Builder = Callable[[int, ScheduleOptions], Schedule]


def builders() -> Mapping[str, Builder]:
    """Return the builder of each strategy that is a schedule: all but `native`, which the engine carries out."""
    return {
        "root": lambda world, given: through_rank(world, given.root),
        "cpu": lambda world, given: through_cpu(world),
        "sharded": lambda world, given: sharded(world, given.weights or None, given.pieces, given.paced),
        "one-shot": lambda world, given: one_shot(world),
        "chain": lambda world, given: chain(world, given.order or None),
        "pipelined-chain": lambda world, given: pipelined_chain(world, given.chunks, given.order or None),
        "ring": lambda world, given: ring(world, given.order or None, given.pieces),
        "bidirectional-ring": lambda world, given: bidirectional(world, given.order or None, given.pieces),
        "multi-ring": lambda world, given: multi_ring(world, given.rings, given.pieces),
        "tree": lambda world, given: tree(world, given.order or None),
        "pipelined-tree": lambda world, given: pipelined_tree(world, given.chunks, given.order or None),
        "double-tree": lambda world, given: double_tree(world, given.chunks, given.order or None),
        "packed-trees": lambda world, given: packed_trees(world, given.trees, given.chunks),
        "recursive-doubling": lambda world, given: recursive_doubling(world),
        "halving-doubling": lambda world, given: halving_doubling(world),
        "hierarchical": _hierarchical,
        "ps": _ps,
    }


def _hierarchical(world: int, given: ScheduleOptions) -> Schedule:
    outer = build(given.outer, len(given.groups), given.across)
    return hierarchical(world, given.groups, outer, given.inner, given.pieces)


def _ps(world: int, given: ScheduleOptions) -> Schedule:
    if given.servers:
        return parameter_server(
            world, given.servers, given.shares or None, given.pieces, given.groups, given.near, given.forwarded
        )
    servers, shares = balanced_shares(world, given.helpers)
    return parameter_server(world, servers, shares, given.pieces)


def build(strategy: str, world: int, options: ScheduleOptions | None = None) -> Schedule:
    """Return the proven all-reduce of a strategy.

    Args:
        strategy: one of `types.STRATEGIES` but `native`.
        world: number of ranks.
        options: of the strategy; the defaults when None.

    Raises:
        UsageError: no schedule has this name; the caller's fault.
        ValueError: the options do not fit the world; the caller's fault.
    """
    known = builders()
    if strategy not in known:
        raise UsageError(f"no schedule is called {strategy!r}", hint=f"one of: {', '.join(known)}")
    given = options or ScheduleOptions()
    if given.order and sorted(given.order) != list(range(world)):
        raise ValueError(f"an order names each of the {world} ranks once, not {list(given.order)}")
    return known[strategy](world, given)
