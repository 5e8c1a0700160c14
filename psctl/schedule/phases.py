"""The phases that all-reduces are made of: an all-gather, and the reduce-scatter that is its reverse.

An all-gather copies chunks from their owners until every rank has all of them; a broadcast is one with a single owner.
Where it copies a chunk from a to b in step t of T, its reverse adds b's value to a's in step T-1-t. A rank copies a
chunk only after it arrived, so in the reverse it sends a sum only after all additions arrived; and each rank got its
copy once, so each contribution is added once. The reverse and then the all-gather are an all-reduce, whose every chunk
is finished at one node and copied from there: bits are equal everywhere.

Phases are a builder's intermediate values; only the checker makes a schedule of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.schedule.checker import prove
from psctl.schedule.schedule import Action, Schedule, Transfer

Transfers = list[Transfer]


class AllGather(msgspec.Struct, frozen=True):
    """Copies that bring each chunk from its owner to all ranks.

    Args:
        owners: where each chunk starts, one for each chunk.
        transfers: the copies; each rank gets each chunk at most once.
        shares: relative size of each chunk.
        nodes: number of ranks and helpers.
    """

    owners: tuple[int, ...]
    transfers: Sequence[Transfer]
    shares: tuple[int, ...]
    nodes: int

    def reordered(self, order: Sequence[int] | None) -> AllGather:
        """Return it among the same ranks in another order; None leaves them.

        Raises:
            ValueError: the order is not one of all ranks; the caller's fault.
        """
        if order is None:
            return self
        if sorted(order) != list(range(self.nodes)):
            raise ValueError(f"an order names each rank once, from 0; not {list(order)}")
        owners = tuple(order[owner] for owner in self.owners)
        return AllGather(owners, relabelled(self.transfers, order), self.shares, self.nodes)


def step_count(transfers: Iterable[Transfer]) -> int:
    """Return the number of steps, which count from 0."""
    return 1 + max((transfer.step for transfer in transfers), default=-1)


def lane_count(transfers: Iterable[Transfer]) -> int:
    """Return the number of lanes, at least 1."""
    return 1 + max((transfer.lane for transfer in transfers), default=0)


def shifted(transfers: Iterable[Transfer], step: int = 0, chunk: int = 0, lane: int = 0) -> Transfers:
    """Return the transfers with these numbers added to their steps, chunks and lanes."""
    return [
        Transfer(one.step + step, one.source, one.destination, one.chunk + chunk, one.action, one.lane + lane)
        for one in transfers
    ]


def relabelled(transfers: Iterable[Transfer], order: Sequence[int]) -> Transfers:
    """Return the transfers with node i called order[i]; nodes beyond the order keep their number."""
    names = dict(enumerate(order))
    return [
        Transfer(
            one.step, names.get(one.source, one.source), names.get(one.destination, one.destination), one.chunk,
            one.action, one.lane,
        )
        for one in transfers
    ]  # fmt: skip


def reverse(transfers: Iterable[Transfer], action: Action = "reduce") -> Transfers:
    """Return the transfers in the opposite direction and order; `copy` makes a gather of a scatter."""
    found = list(transfers)
    last = step_count(found) - 1
    return [Transfer(last - one.step, one.destination, one.source, one.chunk, action, one.lane) for one in found]


def without_gaps(transfers: Iterable[Transfer]) -> Transfers:
    """Return the transfers with empty steps left out."""
    found = list(transfers)
    number = {step: index for index, step in enumerate(sorted({one.step for one in found}))}
    return [Transfer(number[one.step], one.source, one.destination, one.chunk, one.action, one.lane) for one in found]


def overlapped(phases: Sequence[Sequence[Transfer]], chunks: int, pieces: int) -> Transfers:
    """Return `pieces` copies of the phases, in which phase p of piece j runs during phase p-1 of piece j+1.

    The pieces have chunks of their own, so only a busy node makes one wait for another. Step numbers follow slots, each
    as long as the longest phase; slots that stay empty are left out.

    Args:
        phases: transfers of each phase, each counted from step 0.
        chunks: chunks of one piece; piece j has chunks j * chunks and on.
        pieces: number of copies.
    """
    slot = max((step_count(phase) for phase in phases), default=0)
    found: Transfers = []
    for piece in range(pieces):
        for index, phase in enumerate(phases):
            found += shifted(phase, step=(piece + index) * slot, chunk=piece * chunks)
    return without_gaps(found)


def all_reduce(
    name: str,
    world: int,
    gather: AllGather,
    *,
    reduction: Sequence[Transfer] | None = None,
    pieces: int = 1,
    params: Mapping[str, object] | None = None,
) -> Schedule:
    """Return the proven all-reduce that an all-gather makes: a reduction to the owners, then the all-gather.

    Args:
        name: the algorithm's name in job files and output.
        world: number of ranks.
        gather: brings each chunk from its owner to all.
        reduction: brings the sum of each chunk to its owner; the all-gather reversed when None.
        pieces: number of parts of the vector; one is gathered while the next is still reduced.
        params: the options, for output.
    """
    first = reverse(gather.transfers) if reduction is None else list(reduction)
    if pieces == 1:
        transfers = [*first, *shifted(gather.transfers, step=step_count(first))]
    else:
        second = shifted(gather.transfers, lane=lane_count(first))
        transfers = overlapped([first, second], len(gather.shares), pieces)
    return prove(name, world, transfers, gather.shares * pieces, nodes=gather.nodes, params=params)
