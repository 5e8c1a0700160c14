"""The contract of each collective: the chunks that each rank holds before it, and those that it must hold after it.

Five collectives only move data; they are cases of one primitive (`scatter_gather`). Three reduce: reduce,
reduce-scatter, all-reduce. A barrier reduces the set of ranks that have entered, and may count a rank twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from psctl.schedule.checker import Contract, Holdings, all_reduce_contract
from tests.reference.scatter_gather import Collective, Route, ScatterGather


class Group(msgspec.Struct, frozen=True):
    """Some ranks of a world, in an order; a rank's place in it is its rank within the group."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise ValueError(f"a group holds each rank once, counted from 0; not {list(self.ranks)}")

    @classmethod
    def of(cls, ids: Iterable[int] | None, world: int) -> Group:
        """Return the group of these ids; None is the whole world.

        Raises:
            ValueError: an id is not a rank of the world, or comes twice; the caller's fault.
        """
        group = cls.whole(world) if ids is None else cls(tuple(ids))
        if any(rank >= world for rank in group.ranks):
            raise ValueError(f"a world of {world} has no rank {max(group.ranks)}")
        return group

    @classmethod
    def whole(cls, world: int) -> Group:
        """Return the group of all ranks."""
        return cls(tuple(range(world)))

    def union(self, other: Group) -> Group:
        """Return the ranks of either: this group's in its order, then the other's further ones."""
        return Group(self.ranks + tuple(rank for rank in other.ranks if rank not in self.ranks))

    def intersection(self, other: Group) -> Group:
        """Return the ranks that both hold, in this group's order."""
        return Group(tuple(rank for rank in self.ranks if rank in other.ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks


def contract(
    collective: Collective,
    world: int,
    chunks: int,
    root: int = 0,
    owners: Sequence[int] | None = None,
    members: Sequence[int] | None = None,
) -> Contract:
    """Return the contract of a collective for a vector cut into `chunks`.

    Args:
        collective: its name.
        world: number of ranks.
        chunks: number of chunks; an all-to-all needs a multiple of the square of the members' number.
        root: the one that gives (broadcast, scatter) or gets (gather, reduce).
        owners: the rank of each chunk where chunks are dealt out; else they are dealt evenly, in the members' order.
        members: the ranks that take part; all when None.

    Raises:
        ValueError: the numbers do not fit each other; the builder's fault.
    """
    group = Group.of(members or None, world)
    if not group.ranks or (root not in group and collective in ("broadcast", "scatter", "gather", "reduce")):
        raise ValueError(f"the root {root} is not one of the {len(group)} members")
    if collective == "all-reduce" and not members:
        return all_reduce_contract(world, chunks)
    if collective in ("barrier", "reduce", "reduce-scatter", "all-reduce"):
        first: Holdings = {(rank, chunk): 1 << rank for rank in group.ranks for chunk in range(chunks)}
        last = _reduced(collective, group, chunks, root, owners)
    else:
        first, last = _moved(collective, group, chunks, root, owners)
    return Contract(collective, group.ranks, first, last, collective == "barrier", collective == "all-reduce")


def dealt(chunks: int, group: Sequence[int]) -> tuple[int, ...]:
    """Return the owner of each chunk when they are dealt evenly, neighbours to the same one.

    Raises:
        ValueError: the chunks cannot be dealt evenly; the builder's fault.
    """
    if not group or chunks % len(group):
        raise ValueError(f"{chunks} chunks cannot be dealt evenly to {len(group)} ranks: say who owns which")
    each = chunks // len(group)
    return tuple(rank for rank in group for _ in range(each))


def _owners(group: Group, chunks: int, owners: Sequence[int] | None) -> tuple[int, ...]:
    found = tuple(owners) if owners else dealt(chunks, group.ranks)
    if len(found) != chunks or not set(found) <= set(group.ranks):
        raise ValueError(f"{chunks} chunks need an owner each among the members, not {list(found)}")
    return found


def _reduced(collective: str, group: Group, chunks: int, root: int, owners: Sequence[int] | None) -> Holdings:
    everyone = sum(1 << rank for rank in group.ranks)
    if collective == "reduce":
        return {(root, chunk): everyone for chunk in range(chunks)}
    if collective == "reduce-scatter":
        return {(rank, chunk): everyone for chunk, rank in enumerate(_owners(group, chunks, owners))}
    return {(rank, chunk): everyone for rank in group.ranks for chunk in range(chunks)}


def _moved(
    collective: Collective, group: Group, chunks: int, root: int, owners: Sequence[int] | None
) -> tuple[Holdings, Holdings]:
    """Return the holdings of a collective that only moves data."""
    if owners:
        # Dealt by hand, so not in equal units: the same rule, chunk by chunk.
        found = _owners(group, chunks, owners)
        routes: list[Route] = [(rank, group.ranks) for rank in found]
        if collective == "scatter":
            routes = [(root, (rank,)) for rank in found]
        elif collective == "gather":
            routes = [(rank, (root,)) for rank in found]
    else:
        routes = ScatterGather.case(collective, group.ranks, root).routes(chunks)
    first = {(source, chunk): 1 << source for chunk, (source, _) in enumerate(routes)}
    last = {(rank, chunk): 1 << source for chunk, (source, ranks) in enumerate(routes) for rank in ranks}
    return first, last
