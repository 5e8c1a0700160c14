"""A vector divided into the chunks of a schedule, and the writes to chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from psctl.collectives.rank_program import ChunkWrite

BLOCK = 1 << 16
"""Elements that are summed at a time: sums of several operands then stay in the processor's cache."""

ALL = slice(None)


Join = Callable[..., torch.Tensor]
"""Combines two tensors element by element, with `out=`: commutative, such as torch.add."""


class VectorChunks:
    """The ranges of a schedule's chunks in vectors of one length.

    Args:
        ranges: from which element to which each chunk is; empty for a chunk that this rank does not touch.
        join: how values are combined where the schedule reduces.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], join: Join = torch.add) -> None:
        self._ranges, self._join = ranges, join
        self._block = torch.empty(0)

    def size(self, chunks: Sequence[int]) -> int:
        """Return the elements of some chunks together."""
        return sum(self._ranges[chunk][1] - self._ranges[chunk][0] for chunk in chunks)

    def pieces(self, chunks: Sequence[int]) -> int:
        """Return the number of pieces that `places` returns for these chunks."""
        return len(self._runs(chunks))

    def of(self, vector: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a chunk of the vector."""
        start, stop = self._ranges[chunk]
        return vector[start:stop]

    def places(self, vector: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return some chunks of the vector, adjacent ones as one piece, without empty ones."""
        return [vector[start:stop] for start, stop in self._runs(chunks)]

    def staging_pieces(self, buffer: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return the pieces of a staging buffer that receive the pieces of `places`."""
        return list(torch.split(buffer, [stop - start for start, stop in self._runs(chunks)]))

    def parts(self, buffer: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return each chunk that was received into the pieces of `staging_pieces`."""
        return list(torch.split(buffer, [self.size((chunk,)) for chunk in chunks]))

    def split(self, pieces: Sequence[torch.Tensor], vector: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return each chunk of pieces that are divided as `places` returns them."""
        found, left = [], iter(pieces)
        piece, at = next(left, vector[:0]), 0
        for chunk in chunks:
            if at == piece.numel() and self.size((chunk,)):
                piece, at = next(left), 0
            found.append(piece[at : at + self.size((chunk,))])
            at += self.size((chunk,))
        return found

    def write(
        self, write: ChunkWrite, rank: int, vector: torch.Tensor, staged: Mapping[int, torch.Tensor],
        into: torch.Tensor | None = None, span: slice = ALL,
    ) -> None:  # fmt: skip
        """Do a write: combine received chunks in the order of the nodes' numbers, or copy one.

        Args:
            write: the write.
            rank: this node; its own value has the position of this number among the operands.
            vector: the vector whose chunk is written.
            staged: received chunks by source; only read.
            into: written instead of the chunk, which a peer may still read.
            span: the elements of the chunk to write.
        """
        own = self.of(vector, write.chunk)[span]
        place = own if into is None else into[span]
        staged = {source: part[span] for source, part in staged.items()}
        if write.own and len(write.sources) == 1:
            self._join(own, staged[write.sources[0]], out=place)  # a + b is b + a to the last bit
            return
        operands = {**staged, rank: own} if write.own else staged
        order = sorted(operands)
        if len(order) == 1:
            place.copy_(operands[order[0]])
            return
        if len(order) > 2 and place.dtype in (torch.bfloat16, torch.float16):
            for start in range(0, place.numel(), BLOCK):
                first, *others = (operands[each][start : start + BLOCK] for each in order)
                wide = first.float()
                for part in others:
                    self._join(wide, part, out=wide)
                place[start : start + BLOCK].copy_(wide)  # rounded once
            return
        free = order.index(rank) if write.own and into is None else 0
        for start in range(0, place.numel(), BLOCK):
            parts = [operands[each][start : start + BLOCK] for each in order]
            total = parts[0]
            for at, part in enumerate(parts[1:], 1):
                # The chunk itself holds the sum as soon as its own value is added.
                total = self._join(total, part, out=place[start : start + BLOCK] if at >= free else self._sum(part))

    def _sum(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer for a block's sum, which is used until the own value is added."""
        if not self._block.numel() or self._block.dtype != like.dtype or self._block.device != like.device:
            self._block = torch.empty(BLOCK, dtype=like.dtype, device=like.device)
        return self._block[: like.numel()]

    def _runs(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for chunk in chunks:
            start, stop = self._ranges[chunk]
            if start == stop:
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found
