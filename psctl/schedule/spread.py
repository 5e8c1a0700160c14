"""A spread: chunks that start at their owners and are copied until every rank has them all.

A broadcast (one owner) and an all-gather (each rank owns a part) are the same thing here, and what most algorithms are
made of: run backwards it is a reduction (`reverse`). A spread is a builder's half-finished piece; only the checker
makes a schedule of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from psctl.schedule.transfer import Transfer

Transfers = list[Transfer]


class Spread(msgspec.Struct, frozen=True):
    """Copies that bring each chunk from its owner to all.

    Args:
        owners: where each chunk starts, one for each chunk.
        transfers: the copies; each rank gets each chunk at most once.
        shares: relative size of each chunk.
        nodes: ranks and helpers.
    """

    owners: tuple[int, ...]
    transfers: Sequence[Transfer]
    shares: tuple[int, ...]
    nodes: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return steps_of(self.transfers)


def steps_of(transfers: Iterable[Transfer]) -> int:
    """Return how many steps these take, counted from 0."""
    return 1 + max((transfer.step for transfer in transfers), default=-1)


def moved(transfers: Iterable[Transfer], step: int = 0, chunk: int = 0, lane: int = 0) -> Transfers:
    """Return the transfers later by `step`, on chunks and lanes further up."""
    return [
        Transfer(one.step + step, one.source, one.destination, one.chunk + chunk, one.action, one.lane + lane)
        for one in transfers
    ]


def placed(transfers: Iterable[Transfer], order: Sequence[int]) -> Transfers:
    """Return the transfers with node i called order[i]; nodes beyond the order keep their number."""
    names = dict(enumerate(order))
    return [
        Transfer(
            one.step, names.get(one.source, one.source), names.get(one.destination, one.destination), one.chunk,
            one.action, one.lane,
        )
        for one in transfers
    ]  # fmt: skip


def place(spread: Spread, order: Sequence[int] | None) -> Spread:
    """Return the spread among the same ranks in another order; None leaves them.

    Raises:
        ValueError: the order is not one of all ranks; the caller's fault.
    """
    if order is None:
        return spread
    if sorted(order) != list(range(spread.nodes)):
        raise ValueError(f"an order names each rank once, from 0; not {list(order)}")
    names = dict(enumerate(order))
    owners = tuple(names.get(owner, owner) for owner in spread.owners)
    return Spread(owners, placed(spread.transfers, order), spread.shares, spread.nodes)


def packed(transfers: Iterable[Transfer]) -> Transfers:
    """Return the transfers with the empty steps left out."""
    found = list(transfers)
    number = {step: index for index, step in enumerate(sorted({one.step for one in found}))}
    return [Transfer(number[one.step], one.source, one.destination, one.chunk, one.action, one.lane) for one in found]


def pipelined(phases: Sequence[Sequence[Transfer]], chunks: int, pieces: int) -> Transfers:
    """Return `pieces` copies of the phases, of which phase p of piece j runs beside phase p-1 of piece j+1.

    The pieces have chunks of their own, so nothing holds one back for another but a busy node. Step numbers follow a
    clock of slots, each as long as the longest phase; slots that stay empty are left out.

    Args:
        phases: transfers of each phase, each counted from step 0.
        chunks: chunks of one piece; piece j has chunks j * chunks and on.
        pieces: how many.
    """
    slot = max((steps_of(phase) for phase in phases), default=0)
    found: Transfers = []
    for piece in range(pieces):
        for index, phase in enumerate(phases):
            found += moved(phase, step=(piece + index) * slot, chunk=piece * chunks)
    return packed(found)
