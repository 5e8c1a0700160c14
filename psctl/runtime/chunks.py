"""A vector cut into the chunks of a schedule, and what a write does to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psctl.runtime.script import Write
from psctl.schedule.transfer import Schedule


class Chunks:
    """Where the chunks of a schedule lie in vectors of one length.

    Args:
        schedule: cuts.
        length: elements of the vector.
    """

    def __init__(self, schedule: Schedule, length: int) -> None:
        self._ranges = schedule.ranges(length)

    def size(self, chunks: Sequence[int]) -> int:
        """Return the elements of some chunks together."""
        return sum(self._ranges[chunk][1] - self._ranges[chunk][0] for chunk in chunks)

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

    def write(self, write: Write, rank: int, vector: torch.Tensor, aside: Mapping[int, torch.Tensor]) -> None:
        """Do a write: sum what came in, in the order of the nodes' numbers, or copy it.

        Args:
            write: what is done.
            rank: the node that does it; the own value's place among the operands.
            vector: the chunk in it is written.
            aside: what came in, by its source; may be overwritten.
        """
        place = self.of(vector, write.chunk)
        if write.own and len(write.sources) == 1:
            place.add_(aside[write.sources[0]])  # a + b is b + a to the last bit
            return
        operands = {**aside, rank: place} if write.own else aside
        first, *others = sorted(operands)
        total = operands[first]
        for other in others:
            total.add_(operands[other])
        if total is not place:
            place.copy_(total)

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
