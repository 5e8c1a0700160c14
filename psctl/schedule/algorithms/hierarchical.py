"""Hierarchical: sum within each group, all-reduce across the groups, spread within each group.

For fast links inside (a host, a rack) and slow ones outside. Inside, each rank ends up with the group's sum of a part
(or one rank with all of it), which it then reduces with the ranks of the same place in the other groups: the links
outside carry 2(n-1)/n N a group whatever the groups' size. In one piece the phases wait for each other, so a link
inside idles while one outside is busy; in k pieces the second level of one piece runs during the first level of the
next, and only the slowest level counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.algorithms import doubling, ring, root, sharded, trees
from psctl.schedule.checker import prove
from psctl.schedule.phases import AllGather, Transfers, lane_count, overlapped, relabelled, reverse, shifted
from psctl.schedule.schedule import Schedule, Transfer

Groups = Sequence[Sequence[int]]

INNER = ("ring", "sharded", "halving-doubling", "root", "tree", "chain")
"""Algorithms inside a group: the first three split the sum over the group's ranks, the others bring it to one."""


def hierarchical(world: int, groups: Groups, outer: Schedule, inner: str = "ring", pieces: int = 1) -> Schedule:
    """Return the all-reduce over two levels (or more: `outer` may itself be hierarchical).

    Args:
        world: number of ranks.
        groups: the ranks of each group; every rank once.
        outer: the all-reduce across the groups, in which rank g is group g.
        inner: one of INNER; groups of different sizes can't run ring or halving-doubling.
        pieces: number of parts that the vector is cut into.

    Raises:
        ValueError: the groups do not hold every rank once, or don't fit the inner or outer algorithm; the caller's
            fault.
    """
    _check(world, groups, outer)
    levels = [_inside(inner, len(group), min(map(len, groups))) for group in groups]
    owners, shares = levels[0][1].owners, levels[0][1].shares
    if any((gather.owners, gather.shares) != (owners, shares) for _, gather in levels):
        raise ValueError(f"groups of {sorted(map(len, groups))} ranks cannot all run {inner}: try sharded or tree")
    count = len(outer.shares)
    first: Transfers = []
    last: Transfers = []
    for (reduction, gather), group in zip(levels, groups, strict=True):
        first += _within(reduction, group, count)
        last += _within(gather.transfers, group, count)
    across: Transfers = []
    for chunk, owner in enumerate(owners):
        across += shifted(relabelled(outer.transfers, [group[owner] for group in groups]), chunk=chunk * count)
    lanes = lane_count(first)
    phases = [first, shifted(across, lane=lanes), shifted(last, lane=lanes + lane_count(across))]
    transfers = overlapped([phase for phase in phases if phase], len(owners) * count, pieces)
    params = {"groups": [list(group) for group in groups], "inner": inner, "outer": outer.name, "pieces": pieces}
    cut = [share * part for share in shares for part in outer.shares] * pieces
    return prove("hierarchical", world, transfers, cut, params=params)


def _check(world: int, groups: Groups, outer: Schedule) -> None:
    if sorted(rank for group in groups for rank in group) != list(range(world)) or not all(groups):
        raise ValueError(f"the groups must hold each of the {world} ranks once: {[list(group) for group in groups]}")
    if outer.world != len(groups) or outer.nodes != outer.world:
        raise ValueError(f"{len(groups)} groups need an all-reduce of as many ranks without helpers between them")


def _inside(inner: str, size: int, smallest: int) -> tuple[Transfers, AllGather]:
    """Return the reduction and the all-gather within one group; ranks beyond the smallest group's size own nothing."""
    if inner == "ring":
        gather, reduction = ring.both_phases(size)
        return reduction, gather
    if inner == "sharded":
        gather = sharded.all_gather(size, [int(rank < smallest) for rank in range(size)])
    elif inner == "halving-doubling":
        gather = doubling.all_gather(size)
    elif inner == "root":
        gather = root.broadcast(size)
    elif inner == "tree":
        gather = trees.binomial_broadcast(size)
    elif inner == "chain":
        gather = AllGather((0,), trees.broadcast(*trees.chain_edges(size)), (1,), size)
    else:
        raise ValueError(f"no algorithm inside a group is called {inner!r}; one of: {', '.join(INNER)}")
    return reverse(gather.transfers), gather


def _within(transfers: Sequence[Transfer], group: Sequence[int], count: int) -> Transfers:
    """Return a group's transfers among its ranks, each chunk as the `count` chunks of the outer level."""
    return [
        Transfer(one.step, one.source, one.destination, one.chunk * count + part, one.action, one.lane)
        for one in relabelled(transfers, group)
        for part in range(count)
    ]
