"""The contract of each collective: the chunks that each rank holds before it, and those that it must hold after it.

Five collectives only move data: broadcast, scatter, gather, all-gather, all-to-all. Three reduce: reduce,
reduce-scatter, all-reduce. Chunks that are divided among ranks are divided evenly, in rank order; of an all-to-all
among p ranks chunk s * p + d goes from rank s to rank d.
"""

from __future__ import annotations

from typing import Literal

from psctl.schedule.checker import Contract, Holdings, all_reduce_contract

Collective = Literal[
    "broadcast", "scatter", "gather", "all-gather", "reduce", "reduce-scatter", "all-reduce", "all-to-all"
]  # fmt: skip

ROOTED: tuple[Collective, ...] = ("broadcast", "scatter", "gather", "reduce")
"""Collectives in which one rank gives or gets the whole."""

REDUCING: tuple[Collective, ...] = ("reduce", "reduce-scatter", "all-reduce")
"""Collectives that combine the ranks' values."""


def contract(collective: Collective, world: int, chunks: int, root: int = 0) -> Contract:
    """Return the contract of a collective for a vector cut into `chunks`.

    Args:
        collective: its name.
        world: number of ranks.
        chunks: number of chunks; a multiple of the ranks where they are divided, of their square in an all-to-all.
        root: the rank that gives (broadcast, scatter) or gets (gather, reduce).

    Raises:
        ValueError: the numbers do not fit each other; the builder's fault.
    """
    if not 0 <= root < world:
        raise ValueError(f"the root {root} is not one of {world} ranks")
    if collective == "all-reduce":
        return all_reduce_contract(world, chunks)
    ranks, everyone = range(world), (1 << world) - 1
    if collective in REDUCING:
        first: Holdings = {(rank, chunk): 1 << rank for rank in ranks for chunk in range(chunks)}
        if collective == "reduce":
            last = {(root, chunk): everyone for chunk in range(chunks)}
        else:
            last = {(rank, chunk): everyone for chunk, rank in enumerate(owners(world, chunks))}
        return Contract(collective, tuple(ranks), first, last)
    routes = _routes(collective, world, chunks, root)
    first = {(source, chunk): 1 << source for chunk, (source, _) in enumerate(routes)}
    last = {(rank, chunk): 1 << source for chunk, (source, found) in enumerate(routes) for rank in found}
    return Contract(collective, tuple(ranks), first, last)


def owners(world: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each chunk when they are divided evenly, neighbours to the same rank.

    Raises:
        ValueError: the chunks cannot be divided evenly; the builder's fault.
    """
    if not chunks or chunks % world:
        raise ValueError(f"{chunks} chunks cannot be divided evenly among {world} ranks")
    return tuple(rank for rank in range(world) for _ in range(chunks // world))


def _routes(collective: Collective, world: int, chunks: int, root: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return for each chunk the rank that holds it at first, and those that must have it at the end."""
    everyone = tuple(range(world))
    if collective == "broadcast":
        return [(root, everyone)] * chunks
    if collective == "all-to-all":
        if not chunks or chunks % world**2:
            raise ValueError(f"an all-to-all of {world} ranks has a multiple of {world**2} chunks, not {chunks}")
        pairs = [(source, (rank,)) for source in everyone for rank in everyone]
        return [pair for pair in pairs for _ in range(chunks // world**2)]
    found = owners(world, chunks)
    if collective == "scatter":
        return [(root, (rank,)) for rank in found]
    if collective == "gather":
        return [(rank, (root,)) for rank in found]
    return [(rank, everyone) for rank in found]
