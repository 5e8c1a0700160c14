"""A channel among some ranks of a job: its peers are numbered by their places in the group."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from psctl.collectives.channel import Channel, Parcel, PeerPiece, PendingTransfer, VectorExchange


class GroupChannel:
    """A channel between the members of a group, over the channel of all ranks.

    Args:
        ranks: of the group; peer i is ranks[i].
        outside: the channel of all ranks.
    """

    def __init__(self, ranks: Sequence[int], outside: Channel) -> None:
        self._ranks, self._outside = tuple(ranks), outside
        self.posts_ahead = outside.posts_ahead

    def reads_in_place(self, peer: int) -> bool:
        return self._outside.reads_in_place(self._ranks[peer])

    def next_piece(self, peer: int, tag: int) -> PeerPiece:
        return self._outside.next_piece(self._ranks[peer], tag)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        return self._outside.post(*([self._there(each) for each in some] for some in (sends, receives)))

    def _there(self, parcel: Parcel) -> Parcel:
        return Parcel(parcel.piece, self._ranks[parcel.peer], parcel.tag)

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        return self._outside.arrived(pending, size)

    def exchange_for(self, size: int) -> VectorExchange | None:
        return None  # it is among all ranks

    def swap(self, piece: torch.Tensor, peers: Collection[int], tag: int) -> dict[int, torch.Tensor]:
        found = self._outside.swap(piece, [self._ranks[peer] for peer in peers], tag)
        return {peer: found[self._ranks[peer]] for peer in peers}

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._outside.waits_for

    def abort(self, reason: str) -> None:
        self._outside.abort(reason)
