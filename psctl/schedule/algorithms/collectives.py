"""All collectives but all-reduce, by name and algorithm; all-reduce has its strategies in `catalog`.

Chunk i belongs to rank i wherever chunks are dealt out, and in an all-to-all among p ranks chunk s * p + d goes from
rank s to rank d. A reduce is a broadcast backwards, a reduce-scatter an all-gather, a gather a scatter. One-to-all and
all-to-one are other names for scatter and gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from psctl.errors import UsageError
from psctl.schedule.algorithms import (
    barrier,
    binomial,
    bruck,
    chain,
    direct,
    halving_doubling,
    pipelined_tree,
    ring,
    sharded,
)
from psctl.schedule.algorithms import root as star_root
from psctl.schedule.checker import prove
from psctl.schedule.reverse import backwards
from psctl.schedule.scatter_gather import ScatterGather
from psctl.schedule.spread import Spread, Transfers, moved, place, placed, steps_of
from psctl.schedule.transfer import Collective, Schedule, Transfer
from psctl.schedule.tree_spreads import broadcast

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "broadcast": ("tree", "root", "chain", "pipelined-tree", "scatter-ring"),
    "reduce": ("tree", "root", "chain", "pipelined-tree", "scatter-ring"),
    "scatter": ("tree", "root"),
    "gather": ("tree", "root"),
    "all-gather": ("ring", "sharded", "bruck", "halving-doubling"),
    "reduce-scatter": ("ring", "sharded", "bruck", "halving-doubling"),
    "all-to-all": ("pairwise", "direct", "bruck"),
    "barrier": ("dissemination", "token-ring", "root", "all-to-all"),
}
"""The algorithms of each collective, the usual one first; chain and pipelined-tree take chunks."""

NAMES: Mapping[str, Collective] = {
    **{name: name for name in get_args(Collective)},
    "one-to-all": "scatter",
    "all-to-one": "gather",
}
"""What each collective may be called."""


def build(
    collective: str,
    world: int,
    algorithm: str = "",
    *,
    root: int = 0,
    chunks: int = 1,
    shares: Sequence[int] = (),
) -> Schedule:
    """Return the proven schedule of a collective.

    Args:
        collective: its name, or an alias.
        world: number of ranks; for a group of ranks build for the group's size, then `groups.within`.
        algorithm: one of ALGORITHMS; the usual one when empty.
        root: the rank that gives (broadcast, scatter) or gets (reduce, gather).
        chunks: chunks of a pipelined broadcast or reduce.
        shares: size of each rank's chunk where chunks are dealt out; equal when empty.

    Raises:
        UsageError: no such collective, or it has no such algorithm; the caller's fault.
        ValueError: the numbers do not fit the algorithm; the caller's fault.
    """
    name = NAMES.get(collective)
    known = ALGORITHMS.get(name or "", ())
    algorithm = algorithm or (known[0] if known else "")
    if name is None or algorithm not in known:
        raise UsageError(f"{collective} has no algorithm {algorithm!r}", hint=f"one of: {', '.join(known) or 'none'}")
    if not 0 <= root < world or chunks < 1 or (shares and len(shares) != world):
        raise ValueError(f"root {root}, {chunks} chunks, {len(shares)} shares do not fit a world of {world}")
    order = [(root + place) % world for place in range(world)]
    if name in ("broadcast", "reduce"):
        cut, found = _rooted(name, world, algorithm, chunks)
        return prove(algorithm, name, world, placed(found, order), (1,) * cut, root=root)
    if name in ("scatter", "gather"):
        found = _dealt(world, algorithm, order)
        found = backwards(found, "copy") if name == "gather" else found
        return prove(algorithm, name, world, found, shares or (1,) * world, root=root)
    if name in ("all-gather", "reduce-scatter"):
        spread = in_rank_order(_SPREADS[algorithm](world))
        found = backwards(spread.transfers) if name == "reduce-scatter" else list(spread.transfers)
        return prove(algorithm, name, world, found, shares or spread.shares)
    if name == "all-to-all":
        return prove(algorithm, "all-to-all", world, _exchange(world, algorithm), (1,) * world**2)
    return prove(algorithm, "barrier", world, _BARRIERS[algorithm](world))


def in_rank_order(spread: Spread) -> Spread:
    """Return a spread of one chunk a rank with the ranks called such that rank i owns chunk i."""
    order = [0] * len(spread.owners)
    for chunk, owner in enumerate(spread.owners):
        order[owner] = chunk
    return place(spread, order)


def _rooted(collective: str, world: int, algorithm: str, chunks: int) -> tuple[int, Transfers]:
    """Return a broadcast from rank 0, or a reduce to it, and the number of its chunks."""
    if algorithm == "scatter-ring":
        return world, _scatter_ring(collective, world)
    cut = 1 if algorithm in ("tree", "root") else chunks
    if algorithm == "tree":
        found = list(binomial.spread(world).transfers)
    elif algorithm == "root":
        found = list(star_root.spread(world).transfers)
    else:
        edges = chain.edges(world) if algorithm == "chain" else pipelined_tree.edges(world)
        found = broadcast(*edges, chunks)
    return cut, backwards(found) if collective == "reduce" else found


def _scatter_ring(collective: str, world: int) -> Transfers:
    """Return a scatter and then the ring's lap; for a reduce the lap backwards and then a gather of the sums."""
    lap = in_rank_order(ring.spread(world)).transfers
    parts = binomial.scatter(world)
    if collective == "broadcast":
        return [*parts, *moved(lap, step=steps_of(parts))]
    sums = backwards(lap)
    return [*sums, *moved(backwards(parts, "copy"), step=steps_of(sums))]


def _dealt(world: int, algorithm: str, order: Sequence[int]) -> Transfers:
    """Return the scatter from order[0], in which chunk i goes to rank i."""
    if algorithm == "root":
        return direct.transfers(ScatterGather.case("scatter", range(world), order[0]), world)
    return [
        Transfer(one.step, one.source, one.destination, order[one.chunk], one.action)
        for one in placed(binomial.scatter(world), order)
    ]


def _exchange(world: int, algorithm: str) -> Transfers:
    if algorithm == "bruck":
        return bruck.all_to_all(world)
    return direct.transfers(ScatterGather.case("all-to-all", range(world)), world, algorithm == "pairwise")


_SPREADS: Mapping[str, Callable[[int], Spread]] = {
    "ring": ring.spread,
    "sharded": sharded.spread,
    "bruck": bruck.spread,
    "halving-doubling": halving_doubling.spread,
}

_BARRIERS: Mapping[str, Callable[[int], Transfers]] = {
    "dissemination": barrier.dissemination,
    "token-ring": barrier.token_ring,
    "root": barrier.through_root,
    "all-to-all": barrier.all_to_all,
}
