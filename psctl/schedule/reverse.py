"""Reductions are spreads run backwards.

Where a spread copies a chunk from a to b in step t of T, its reverse adds b's value to a's in step T-1-t. A copy goes
out only after it came in, so the reverse sends on only after all additions came in; and each rank got its copy once,
so each contribution is added once. The tree of copies that led away from the owner leads to it: a broadcast becomes a
reduce, an all-gather a reduce-scatter, and one after the other makes an all-reduce, whose every chunk is finished at
one node and copied from there: bits are equal everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psctl.schedule.checker import prove
from psctl.schedule.spread import Spread, Transfers, moved, pipelined, steps_of
from psctl.schedule.transfer import Action, Schedule, Transfer


def backwards(transfers: Iterable[Transfer], action: Action = "reduce") -> Transfers:
    """Return the transfers in the opposite direction and order; `copy` makes a gather of a scatter."""
    found = list(transfers)
    last = steps_of(found) - 1
    return [Transfer(last - one.step, one.destination, one.source, one.chunk, action, one.lane) for one in found]


def turned(spread: Spread, up: Sequence[Transfer] | None = None, lane: int = 0) -> Transfers:
    """Return the transfers of an all-reduce: to the owners, and back to all.

    Args:
        spread: the way back to all.
        up: the way to the owners; the spread run backwards when None.
        lane: added to the lanes of the way back.
    """
    first = backwards(spread.transfers) if up is None else up
    return [*first, *moved(spread.transfers, step=steps_of(first), lane=lane)]


def all_reduce(
    name: str,
    world: int,
    spread: Spread,
    *,
    up: Sequence[Transfer] | None = None,
    pieces: int = 1,
    params: Mapping[str, object] | None = None,
) -> Schedule:
    """Return the proven all-reduce that a spread makes: itself backwards, then forwards.

    Args:
        name: as users know the algorithm.
        world: number of ranks.
        spread: brings each chunk from its owner to all.
        up: another way to the owners than the spread backwards.
        pieces: cut everything into so many pieces, of which one goes back while the next still comes in.
        params: what was chosen, for people.
    """
    first = backwards(spread.transfers) if up is None else list(up)
    if pieces == 1:
        transfers = turned(spread, first)
    else:
        lanes = 1 + max((one.lane for one in first), default=0)
        transfers = pipelined([first, moved(spread.transfers, lane=lanes)], len(spread.shares), pieces)
    shares = spread.shares * pieces
    return prove(name, "all-reduce", world, transfers, shares, nodes=spread.nodes, params=params)
