"""The division of a bucket's vector among the ranks that step its parameters.

The vector has a chunk for each chunk of the schedule. A chunk holds pieces of parameters and then, for each piece, one
element that counts the ranks with a gradient, so that both arrive at the chunk's owner in one sum. Parameters are cut
at multiples of ALIGN elements from their first, as shards are (ps/shards.py): then torch's vector loops end where they
would on the whole parameter, and a step by pieces has the bits of a step by parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from psctl.ps.pieces import Piece
from psctl.ps.shards import ALIGN

PADDING = 16
"""Elements; a chunk's length is a multiple."""


class VectorChunk(NamedTuple):
    """One chunk of a bucket's vector.

    `start`, `stop`: its elements of the vector, with padding at the end; `pieces`: `at` counts from `start`;
    `marks`: the first of the elements that count gradients, one a piece, in the vector.
    """

    owner: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    marks: int

    @property
    def elements(self) -> int:
        """Elements of the pieces, which lie one after another from `start`."""
        return sum(piece.size for piece in self.pieces)


def partition(
    sizes: Sequence[tuple[int, int]], owners: Sequence[int], shares: Sequence[int], *, equal: bool = False
) -> tuple[VectorChunk, ...]:
    """Divide the parameters of a bucket among the owners of chunks.

    Args:
        sizes: of each parameter its index, which pieces name it by, and its elements, in the bucket's order.
        owners: the rank of each chunk.
        shares: relative size of each chunk.
        equal: all chunks get the same length.

    Returns:
        the chunks, one after another; every element of every parameter is in exactly one piece, and a parameter
        without elements is one empty piece.
    """
    starts = [0, *accumulate(size for _, size in sizes)]
    whole = sum(shares)
    cuts = [0, *(_aligned(starts[-1] * before // whole, starts) for before in accumulate(shares))]
    found: list[list[Piece]] = []
    first = 0  # the first parameter that a later chunk may hold
    for low, high in pairwise(cuts):
        held: list[Piece] = []
        used = 0
        for place in range(first, len(sizes)):
            index, size = sizes[place]
            start, stop = max(low, starts[place]), min(high, starts[place] + size)
            if start < stop or (size == 0 and start == starts[place] <= high):
                held.append(Piece(index, start - starts[place], used, stop - start))
                used += stop - start
            if starts[place] + size > high:
                first = place
                break
            first = place + 1
        found.append(held)
    return _laid_out(found, owners, equal=equal)


def _aligned(at: int, starts: Sequence[int]) -> int:
    """Return the place nearest to `at` where a parameter begins or may be cut."""
    place = bisect_right(starts, at) - 1
    if place == len(starts) - 1:
        return starts[-1]
    within = (at - starts[place] + ALIGN // 2) // ALIGN * ALIGN
    return min(starts[place] + within, starts[place + 1])


def _laid_out(found: Sequence[Sequence[Piece]], owners: Sequence[int], *, equal: bool) -> tuple[VectorChunk, ...]:
    lengths = [
        -(-(sum(piece.size for piece in held) + len(held)) // PADDING) * PADDING for held in found
    ]  # fmt: skip
    if equal:
        lengths = [max(lengths)] * len(lengths)
    starts = [0, *accumulate(lengths)]
    return tuple(
        VectorChunk(owner, start, start + length, tuple(held), start + sum(piece.size for piece in held))
        for owner, start, length, held in zip(owners, starts, lengths, found, strict=False)
    )
