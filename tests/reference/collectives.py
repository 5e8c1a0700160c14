"""All collectives but all-reduce, by name and algorithm; all-reduce has its strategies in `catalog`.

Chunk i belongs to rank i wherever chunks are dealt out, and in an all-to-all among p ranks chunk s * p + d goes from
rank s to rank d. A reduce is a broadcast in reverse, a reduce-scatter an all-gather, a gather a scatter. One-to-all and
all-to-one are other names for scatter and gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from psctl.errors import UsageError
from psctl.schedule.algorithms import doubling, ring, root, sharded, trees
from psctl.schedule.phases import AllGather, Transfers, relabelled, reverse, shifted, step_count
from psctl.schedule.schedule import Transfer
from tests.reference import barrier, bruck, direct
from tests.reference.collective_schedule import CollectiveSchedule, prove
from tests.reference.scatter_gather import Collective, ScatterGather

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
) -> CollectiveSchedule:
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
        return prove(algorithm, name, world, relabelled(found, order), (1,) * cut, root=root)
    if name in ("scatter", "gather"):
        found = _dealt(world, algorithm, order)
        found = reverse(found, "copy") if name == "gather" else found
        return prove(algorithm, name, world, found, shares or (1,) * world, root=root)
    if name in ("all-gather", "reduce-scatter"):
        gather = in_rank_order(ALL_GATHERS[algorithm](world))
        found = reverse(gather.transfers) if name == "reduce-scatter" else list(gather.transfers)
        return prove(algorithm, name, world, found, shares or gather.shares)
    if name == "all-to-all":
        return prove(algorithm, "all-to-all", world, _exchange(world, algorithm), (1,) * world**2)
    return prove(algorithm, "barrier", world, _BARRIERS[algorithm](world))


def in_rank_order(gather: AllGather) -> AllGather:
    """Return an all-gather of one chunk a rank with the ranks renumbered such that rank i owns chunk i."""
    order = [0] * len(gather.owners)
    for chunk, owner in enumerate(gather.owners):
        order[owner] = chunk
    return gather.reordered(order)


def _rooted(collective: str, world: int, algorithm: str, chunks: int) -> tuple[int, Transfers]:
    """Return a broadcast from rank 0, or a reduce to it, and the number of its chunks."""
    if algorithm == "scatter-ring":
        return world, _scatter_ring(collective, world)
    cut = 1 if algorithm in ("tree", "root") else chunks
    if algorithm == "tree":
        found = list(trees.binomial_broadcast(world).transfers)
    elif algorithm == "root":
        found = list(root.broadcast(world).transfers)
    else:
        edges = trees.chain_edges(world) if algorithm == "chain" else trees.binary_edges(world)
        found = pipelined_broadcast(*edges, chunks)
    return cut, reverse(found) if collective == "reduce" else found


def _scatter_ring(collective: str, world: int) -> Transfers:
    """Return a scatter and then the ring's all-gather; for a reduce its reverse and then a gather of the sums."""
    lap = in_rank_order(ring.all_gather(world)).transfers
    parts = binomial_scatter(world)
    if collective == "broadcast":
        return [*parts, *shifted(lap, step=step_count(parts))]
    sums = reverse(lap)
    return [*sums, *shifted(reverse(parts, "copy"), step=step_count(sums))]


def _dealt(world: int, algorithm: str, order: Sequence[int]) -> Transfers:
    """Return the scatter from order[0], in which chunk i goes to rank i."""
    if algorithm == "root":
        return direct.transfers(ScatterGather.case("scatter", range(world), order[0]), world)
    return [
        Transfer(one.step, one.source, one.destination, order[one.chunk], one.action)
        for one in relabelled(binomial_scatter(world), order)
    ]


def binomial_scatter(world: int) -> Transfers:
    """Return the copies that bring chunk i from rank 0 to rank i, halving what is sent in every round."""
    return [
        Transfer(step, parent, child, chunk, "copy")
        for step, edges in enumerate(trees.binomial_rounds(world))
        for parent, child, end in edges
        for chunk in range(child, end)
    ]


def pipelined_broadcast(root: int, edges: trees.Edges, chunks: int) -> Transfers:
    """Return the pipelined broadcast of `chunks` chunks down one tree."""
    down = trees.broadcast(root, edges)
    return [one for chunk in range(chunks) for one in shifted(down, step=chunk, chunk=chunk)]


def _exchange(world: int, algorithm: str) -> Transfers:
    if algorithm == "bruck":
        return bruck.all_to_all(world)
    return direct.transfers(ScatterGather.case("all-to-all", range(world)), world, algorithm == "pairwise")


ALL_GATHERS: Mapping[str, Callable[[int], AllGather]] = {
    "ring": ring.all_gather,
    "sharded": sharded.all_gather,
    "bruck": bruck.all_gather,
    "halving-doubling": doubling.all_gather,
}

_BARRIERS: Mapping[str, Callable[[int], Transfers]] = {
    "dissemination": barrier.dissemination,
    "token-ring": barrier.token_ring,
    "root": barrier.through_root,
    "all-to-all": barrier.all_to_all,
}
