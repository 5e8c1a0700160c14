"""All collectives but all-reduce, by name and algorithm; all-reduce has its strategies in `catalog`.

Chunk i belongs to rank i wherever chunks are divided, and in an all-to-all among p ranks chunk s * p + d goes from
rank s to rank d. A reduce is a broadcast in reverse, a reduce-scatter an all-gather, a gather a scatter. Algorithms
have the names of the strategies that they are parts of:

    tree                 binomial; of a scatter what is sent halves in every round
    root                 the root sends to all others directly, or gets from all
    pipelined-chain, pipelined-tree, packed-trees   chunk behind chunk down a chain, a binary tree, or several trees
    ring                 round a ring; broadcast: a scatter, then the ring's all-gather (van de Geijn); reduce: its
                         reverse; all-to-all: one peer at a time, at rising distance (pairwise exchange)
    sharded              each pair directly, all at once
    recursive-doubling   Bruck: what a rank holds doubles in every step, for any number of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from psctl.errors import UsageError
from psctl.schedule.algorithms import bruck, ring, root, sharded, trees
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.checker import prove
from psctl.schedule.contracts import REDUCING, ROOTED, Collective, contract
from psctl.schedule.phases import AllGather, Transfers, lane_count, relabelled, reverse, shifted, step_count
from psctl.schedule.schedule import Schedule, Transfer

_ROOTED = ("tree", "root", "pipelined-chain", "pipelined-tree", "packed-trees", "ring")

ALGORITHMS: Mapping[Collective, tuple[str, ...]] = {
    "broadcast": _ROOTED,
    "reduce": _ROOTED,
    "scatter": ("tree", "root"),
    "gather": ("tree", "root"),
    "all-gather": ("ring", "sharded", "recursive-doubling"),
    "reduce-scatter": ("ring", "sharded", "recursive-doubling"),
    "all-to-all": ("ring", "sharded", "recursive-doubling"),
}
"""The algorithms of each collective, the usual one first."""

PIPELINES = ("pipelined-chain", "pipelined-tree", "packed-trees")
"""Algorithms whose number of chunks is an option."""


def build(
    collective: Collective, world: int, algorithm: str = "", *, root: int = 0, options: ScheduleOptions | None = None
) -> Schedule:
    """Return the proven schedule of a collective.

    Args:
        collective: its name.
        world: number of ranks.
        algorithm: one of ALGORITHMS; the usual one when empty.
        root: the rank that gives (broadcast, scatter) or gets (reduce, gather).
        options: `chunks` of a pipeline, `trees` of packed-trees, which get the root as their root; the defaults when
            None.

    Raises:
        UsageError: no such collective, or it has no such algorithm; the caller's fault.
        ValueError: the numbers do not fit the algorithm; the caller's fault.
    """
    known = ALGORITHMS.get(collective, ())
    algorithm = algorithm or (known[0] if known else "")
    if algorithm not in known:
        raise UsageError(f"{collective} has no algorithm {algorithm!r}", hint=f"one of: {', '.join(known) or 'none'}")
    given = options or ScheduleOptions()
    if not 0 <= root < world or given.chunks < 1:
        raise ValueError(f"root {root} and {given.chunks} chunks do not fit a world of {world}")
    if collective in ("broadcast", "reduce"):
        shares, found = _broadcast(world, algorithm, root, given)
        found = _reversed(found, algorithm, world) if collective == "reduce" else found
    elif collective in ROOTED:
        shares, found = (1,) * world, _scatter(world, algorithm, root)
        found = reverse(found, "copy") if collective == "gather" else found
    elif collective == "all-to-all":
        shares, found = (1,) * world**2, _ALL_TO_ALLS[algorithm](world)
    else:
        gather = in_rank_order(_ALL_GATHERS[algorithm](world))
        shares, found = gather.shares, list(gather.transfers)
        found = reverse(found) if collective in REDUCING else found
    params: dict[str, object] = {"chunks": given.chunks} if algorithm in PIPELINES else {}
    kept = contract(collective, world, len(shares), root)
    return prove(algorithm, world, found, shares, params=params, contract=kept, root=root)


def in_rank_order(gather: AllGather) -> AllGather:
    """Return an all-gather of one chunk a rank with the ranks renumbered such that rank i owns chunk i."""
    order = [0] * len(gather.owners)
    for chunk, owner in enumerate(gather.owners):
        order[owner] = chunk
    return gather.reordered(order)


# ---- one rank to all -------------------------------------------------------------------------------------------------


def _broadcast(world: int, algorithm: str, start: int, given: ScheduleOptions) -> tuple[tuple[int, ...], Transfers]:
    """Return a broadcast, and the shares of its chunks."""
    order = [(start + place) % world for place in range(world)]
    if algorithm == "packed-trees":
        packed = given.trees or ((start, tuple((start, rank) for rank in range(world) if rank != start), 1),)
        return _packed(packed, start, given.chunks)
    if algorithm == "ring":
        lap, parts = in_rank_order(ring.all_gather(world)).transfers, binomial_scatter(world)
        return (1,) * world, relabelled([*parts, *shifted(lap, step=step_count(parts))], order)
    if algorithm == "tree":
        return (1,), relabelled(trees.binomial_broadcast(world).transfers, order)
    if algorithm == "root":
        return (1,), relabelled(root.broadcast(world).transfers, order)
    edges = trees.chain_edges(world) if algorithm == "pipelined-chain" else trees.binary_edges(world)
    return (1,) * given.chunks, relabelled(pipelined_broadcast(*edges, given.chunks), order)


def _reversed(found: Transfers, algorithm: str, world: int) -> Transfers:
    """Return the reduce that a broadcast is in reverse; of the ring's scatter the reverse only moves sums."""
    if algorithm != "ring":
        return reverse(found)
    lap = step_count(found) - (world - 1)
    scatter, gather = [one for one in found if one.step < lap], [one for one in found if one.step >= lap]
    sums = reverse(shifted(gather, step=-lap))
    return [*sums, *shifted(reverse(scatter, "copy"), step=step_count(sums))]


def pipelined_broadcast(start: int, edges: trees.Edges, chunks: int) -> Transfers:
    """Return the pipelined broadcast of `chunks` chunks down one tree."""
    down = trees.broadcast(start, edges)
    return [one for chunk in range(chunks) for one in shifted(down, step=chunk, chunk=chunk)]


def _packed(packed: Sequence[trees.WeightedTree], start: int, chunks: int) -> tuple[tuple[int, ...], Transfers]:
    """Return the broadcast over trees side by side, each rooted anew at `start`; links carry bytes either way."""
    found: Transfers = []
    shares: tuple[int, ...] = ()
    lanes = 0
    for _, edges, weight in packed:
        down = pipelined_broadcast(start, trees.rooted(start, edges), chunks)
        found += shifted(down, chunk=len(shares), lane=lanes)
        shares += (weight,) * chunks
        lanes += lane_count(down)
    return shares, found


def _scatter(world: int, algorithm: str, start: int) -> Transfers:
    """Return the scatter in which chunk i goes to rank i."""
    order = [(start + place) % world for place in range(world)]
    if algorithm == "root":
        others = [rank for rank in range(world) if rank != start]
        return [Transfer(0, start, rank, rank, "copy", (rank - start) % world - 1) for rank in others]
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


# ---- all to all ------------------------------------------------------------------------------------------------------


def _direct(world: int, *, paced: bool) -> Transfers:
    """Return the all-to-all without steps between: one peer at a time, or all at once, each on a lane of its own."""
    return [
        Transfer(away - 1 if paced else 0, rank, (rank + away) % world, rank * world + (rank + away) % world, "copy",
                 0 if paced else away - 1)
        for away in range(1, world)
        for rank in range(world)
    ]  # fmt: skip


_ALL_GATHERS: Mapping[str, Callable[[int], AllGather]] = {
    "ring": ring.all_gather,
    "sharded": sharded.all_gather,
    "recursive-doubling": bruck.all_gather,
}

_ALL_TO_ALLS: Mapping[str, Callable[[int], Transfers]] = {
    "ring": lambda world: _direct(world, paced=True),
    "sharded": lambda world: _direct(world, paced=False),
    "recursive-doubling": bruck.all_to_all,
}
