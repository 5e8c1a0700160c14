"""A vector cut into the chunks of a schedule, and what a write does to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psctl.collectives.rank_program import ChunkWrite
from psctl.schedule.schedule import Schedule

BLOCK = 1 << 16
"""Elements that are summed at a time: sums of several operands then stay in the processor's cache."""

ALL = slice(None)


class VectorChunks:
    """Where the chunks of a schedule lie in vectors of one length.

    Args:
        schedule: cuts.
        length: elements of the vector.
    """

    def __init__(self, schedule: Schedule, length: int) -> None:
        self._ranges = schedule.ranges(length)
        self._block = torch.empty(0)

    def size(self, chunks: Sequence[int]) -> int:
        """Return the elements of some chunks together."""
        return sum(self._ranges[chunk][1] - self._ranges[chunk][0] for chunk in chunks)

    def pieces(self, chunks: Sequence[int]) -> int:
        """Return how many pieces `places` gives of these."""
        return len(self._runs(chunks))

    def of(self, vector: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a chunk of the vector."""
        start, stop = self._ranges[chunk]
        return vector[start:stop]

    def places(self, vector: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return some chunks of the vector, neighbours in one, empty ones left out."""
        return [vector[start:stop] for start, stop in self._runs(chunks)]

    def aside(self, buffer: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return the pieces of a buffer that take what is sent from `places`."""
        found, at = [], 0
        for start, stop in self._runs(chunks):
            found.append(buffer[at : at + stop - start])
            at += stop - start
        return found

    def parts(self, buffer: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return each chunk of what was received into the pieces of `aside`."""
        found, at = [], 0
        for chunk in chunks:
            size = self.size((chunk,))
            found.append(buffer[at : at + size])
            at += size
        return found

    def lent(self, pieces: Sequence[torch.Tensor], vector: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
        """Return each chunk of what lies in pieces as `places` gives them."""
        found, left = [], iter(pieces)
        piece, at = next(left, vector[:0]), 0
        for chunk in chunks:
            if at == piece.numel() and self.size((chunk,)):
                piece, at = next(left), 0
            found.append(piece[at : at + self.size((chunk,))])
            at += self.size((chunk,))
        return found

    def write(
        self, write: ChunkWrite, rank: int, vector: torch.Tensor, aside: Mapping[int, torch.Tensor],
        into: torch.Tensor | None = None, span: slice = ALL,
    ) -> None:  # fmt: skip
        """Do a write: sum what came in, in the order of the nodes' numbers, or copy it.

        Args:
            write: what is done.
            rank: the node that does it; the own value's place among the operands.
            vector: the chunk in it is written.
            aside: what came in, by its source; only read.
            into: is written instead of the chunk, which may still be read.
            span: the elements of the chunk that are written.
        """
        own = self.of(vector, write.chunk)[span]
        place = own if into is None else into[span]
        aside = {source: part[span] for source, part in aside.items()}
        if write.own and len(write.sources) == 1:
            torch.add(own, aside[write.sources[0]], out=place)  # a + b is b + a to the last bit
            return
        operands = {**aside, rank: own} if write.own else aside
        order = sorted(operands)
        if len(order) == 1:
            place.copy_(operands[order[0]])
            return
        if len(order) > 2 and place.dtype in (torch.bfloat16, torch.float16):
            for start in range(0, place.numel(), BLOCK):
                first, *others = (operands[each][start : start + BLOCK] for each in order)
                wide = first.float()
                for part in others:
                    wide.add_(part)
                place[start : start + BLOCK].copy_(wide)  # rounded once
            return
        free = order.index(rank) if write.own and into is None else 0
        for start in range(0, place.numel(), BLOCK):
            parts = [operands[each][start : start + BLOCK] for each in order]
            total = parts[0]
            for at, part in enumerate(parts[1:], 1):
                # The place takes sums as soon as its own value is in one.
                total = torch.add(total, part, out=place[start : start + BLOCK] if at >= free else self._sum(part))

    def _sum(self, like: torch.Tensor) -> torch.Tensor:
        """Return where a block's sum stands until the own value joins it."""
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
