"""Hierarchical: sum within each group, all-reduce across the groups, spread within each group.

For fast links inside (a host, a rack) and slow ones outside. Inside, each rank ends up with the group's sum of a part
(or one rank with all of it), which it then reduces with its like in the other groups: outside carry 2(n-1)/n N a group
whatever the groups' size. In one piece the phases wait for each other, so a link inside idles while one outside works;
in k pieces the second level of one runs beside the first of the next, and only the slowest level counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.algorithms import binomial, chain, halving_doubling, ring, root, sharded
from psctl.schedule.checker import prove
from psctl.schedule.reverse import backwards
from psctl.schedule.spread import Spread, Transfers, moved, pipelined, placed
from psctl.schedule.transfer import Schedule, Transfer
from psctl.schedule.tree_spreads import down

Groups = Sequence[Sequence[int]]

INNER = ("ring", "sharded", "halving-doubling", "root", "tree", "chain")
"""What can run inside a group: the first three split the sum over the group's ranks, the others bring it to one."""


def build(world: int, groups: Groups, outer: Schedule, inner: str = "ring", pieces: int = 1) -> Schedule:
    """Return the all-reduce over two levels (or more: `outer` may itself be hierarchical).

    Args:
        world: number of ranks.
        groups: the ranks of each group; every rank once.
        outer: the all-reduce across the groups, whose rank g stands for group g.
        inner: one of INNER; groups of different sizes can't run ring or halving-doubling.
        pieces: cut the vector so often.

    Raises:
        ValueError: the groups do not hold every rank once, or don't fit the inner or outer algorithm; the caller's
            fault.
    """
    _check(world, groups, outer)
    levels = [_inside(inner, len(group), min(map(len, groups))) for group in groups]
    owners, shares = levels[0][1].owners, levels[0][1].shares
    if any((spread.owners, spread.shares) != (owners, shares) for _, spread in levels):
        raise ValueError(f"groups of {sorted(map(len, groups))} ranks cannot all run {inner}: try sharded or tree")
    count = len(outer.shares)
    first = [one for (up, _), group in zip(levels, groups, strict=True) for one in _within(up, group, count)]
    last = [one for (_, way), group in zip(levels, groups, strict=True) for one in _within(way.transfers, group, count)]
    across: Transfers = []
    for chunk, owner in enumerate(owners):
        across += moved(placed(outer.transfers, [group[owner] for group in groups]), chunk=chunk * count)
    lanes = _lanes(first)
    phases = [first, moved(across, lane=lanes), moved(last, lane=lanes + _lanes(across))]
    transfers = pipelined([phase for phase in phases if phase], len(owners) * count, pieces)
    params = {"groups": [list(group) for group in groups], "inner": inner, "outer": outer.name, "pieces": pieces}
    cut = [share * part for share in shares for part in outer.shares] * pieces
    return prove("hierarchical", "all-reduce", world, transfers, cut, params=params)


def _check(world: int, groups: Groups, outer: Schedule) -> None:
    if sorted(rank for group in groups for rank in group) != list(range(world)) or not all(groups):
        raise ValueError(f"the groups must hold each of the {world} ranks once: {[list(group) for group in groups]}")
    if outer.collective != "all-reduce" or outer.world != len(groups) or outer.nodes != outer.world:
        raise ValueError(f"{len(groups)} groups need an all-reduce of as many ranks without helpers between them")


def _inside(inner: str, size: int, smallest: int) -> tuple[Transfers, Spread]:
    """Return the way in and the way back within one group; ranks beyond the smallest group's size own nothing."""
    if inner == "ring":
        there, up = ring.both_laps(size)
        return up, there
    if inner == "sharded":
        there = sharded.spread(size, [int(rank < smallest) for rank in range(size)])
    elif inner == "halving-doubling":
        there = halving_doubling.spread(size)
    elif inner == "root":
        there = root.spread(size)
    elif inner == "tree":
        there = binomial.spread(size)
    elif inner == "chain":
        there = Spread((0,), down(*chain.edges(size)), (1,), size)
    else:
        raise ValueError(f"no algorithm inside a group is called {inner!r}; one of: {', '.join(INNER)}")
    return backwards(there.transfers), there


def _within(transfers: Sequence[Transfer], group: Sequence[int], count: int) -> Transfers:
    """Return a group's transfers among its ranks, each chunk as the `count` chunks of the level across."""
    return [
        Transfer(one.step, one.source, one.destination, one.chunk * count + part, one.action, one.lane)
        for one in placed(transfers, group)
        for part in range(count)
    ]


def _lanes(transfers: Sequence[Transfer]) -> int:
    return 1 + max((one.lane for one in transfers), default=0)
