"""The joint gradient's norms at a worker: what servers say of each shard's pieces, by clock and by parameter."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.ps.dense.client.receive_buffers import wrong
from psctl.ps.messages import NormsAnswer
from psctl.ps.pieces import Piece


class JointNorms:
    """Squares of 2-norms as they come in. Calls must not overlap.

    Args:
        held: the pieces of each shard.
    """

    def __init__(self, held: Sequence[Sequence[Piece]]) -> None:
        self.wanted: int | None = None
        """The clock whose norms were asked for last."""
        self._held = held
        self._squares: dict[int, dict[int, list[float | None]]] = {}  # clock -> shard -> of each piece

    def on_answer(self, server: int, message: NormsAnswer) -> None:
        """Take in what a server says of a shard.

        Raises:
            ProtocolError: the shard has other pieces; the server's fault.
        """
        if len(message.squares) != len(self._held[message.shard]):
            raise wrong(server, message.shard, f"norms of {len(message.squares)} pieces")
        self._squares.setdefault(message.clock, {})[message.shard] = message.squares

    def missing_shards(self, clock: int) -> list[int]:
        """Return the shards whose norms of `clock` are not here."""
        found = self._squares.get(clock, {})
        return [shard for shard in range(len(self._held)) if shard not in found]

    def by_parameter(self, clock: int) -> dict[int, float] | None:
        """Return the squares of `clock` by parameter, summed in piece order; None when some shard's are missing."""
        if self.missing_shards(clock):
            return None
        each = [
            one
            for shard, squares in self._squares[clock].items()
            for one in zip(self._held[shard], squares, strict=True)
        ]
        parts = [(piece.parameter, piece.within.start, square) for piece, square in each if square is not None]
        sums: dict[int, float] = {}
        for parameter, _, square in sorted(parts):
            sums[parameter] = sums.get(parameter, 0.0) + square
        for old in [known for known in self._squares if known < clock]:
            del self._squares[old]
        return sums
