"""Codes a worker's gradients of a shard with error feedback, and adds such codes to a sum.

Bytes. The pieces that a worker has a gradient for, one after the other, each beginning at a multiple of 8:

    count    int32, and 4 bytes of padding; -1: the gradient is not finite, nothing follows
    places   of `count` elements of the piece (sparsification.py)
    values   of these elements (codecs.py)

Error feedback (Seide and others 2014; Karimireddy and others 2019). A worker keeps what its pushes left out, the
residual, and adds it to the next gradient of that piece: x = gradient + residual is coded, and x minus the value that
the server decodes is the new residual. So nothing is lost, only delayed: at any time the sum of the decoded values and
the residual is the sum of the gradients. A gradient that is not finite reaches the sum as not-a-number, as it would
uncompressed (torch's GradScaler tests for that), and does not change the residual.

A push is coded once. Its bytes do not change until it is acknowledged, so one that must be sent again is bitwise the
same, and the residual changes once a clock, whatever fails meanwhile.

The server decodes a piece in blocks that fit the cache, directly into the sum: no decoded gradient is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from psctl.ps.compression.codecs import BLOCK, codec
from psctl.ps.compression.sparsification import chosen, kept, most, places_size, read_places, write_places
from psctl.ps.pieces import Piece
from psctl.types import Compression

ADDED = 64 * BLOCK
"""Elements that are decoded and added at a time."""

_HEAD = 8
_NOT_FINITE = -1
_LARGEST = torch.finfo(torch.float32).max


class Coder:
    """Codes gradients of one dtype; both ends have the same coder.

    Args:
        how: the job's compression.
        dtype: of the gradients, a real float type.
    """

    def __init__(self, how: Compression, dtype: torch.dtype) -> None:
        self.how, self.dtype = how, dtype
        self._values = codec(how.kind, dtype)

    def limit(self, held: Sequence[Piece]) -> int:
        """Return the bytes that the code of these pieces takes at most."""
        return sum(_HEAD + self._most(piece.size) for piece in held)

    def _most(self, total: int) -> int:
        count = most(self.how, total)
        places = 0 if count == total and not self._chooses else min(4 * count, -(-total // 8))
        return _aligned(places) + _aligned(self._values.size(count))

    @property
    def _chooses(self) -> bool:
        return bool(self.how.skip or self.how.significance or self.how.kind == "topk")

    # ---- a worker's end ---------------------------------------------------------------------------------------------

    def encode(
        self,
        gradients: torch.Tensor,
        held: Sequence[Piece],
        present: Sequence[bool],
        residual: torch.Tensor | None,
        out: torch.Tensor,
        seed: tuple[int, ...] = (),
    ) -> int:
        """Write a shard's gradients into `out`; return the number of bytes.

        Args:
            gradients: the shard's, flat; only read.
            held: its pieces.
            present: which of them have a gradient.
            residual: the shard's, flat; changed. None without error feedback.
            out: `limit` bytes.
            seed: of the random numbers of random_skip.
        """
        used = 0
        for number, (piece, there) in enumerate(zip(held, present, strict=True)):
            if there:
                where = (0, piece.at, piece.size)
                left = None if residual is None else residual.narrow(*where)
                used += self._encode(gradients.narrow(*where), left, out[used:], (*seed, number))
        return used

    def _encode(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, seed: tuple[int, ...]
    ) -> int:
        head, total = out[:_HEAD].view(torch.int32), gradient.numel()
        sent = kept(self.how, total, seed)
        if sent is not None:
            gradient = torch.where(sent, gradient / (1 - self.how.skip), 0.0)
        if residual is not None and total:
            if not all(abs(float(end)) <= _LARGEST for end in gradient.aminmax()):
                head[0] = _NOT_FINITE
                return _HEAD
            gradient = residual.add_(gradient)
        places = chosen(self.how, gradient, sent)
        values = gradient if places is None else gradient[places]
        if residual is not None and self._values.largest < _LARGEST:
            values = values.clamp(-self._values.largest, self._values.largest)  # the rest is in later pushes
        count = head[0] = values.numel()
        first = _HEAD + _aligned(places_size(count, total))
        if places is not None and count < total:
            write_places(places, total, out[_HEAD : _HEAD + places_size(count, total)])
        size = self._values.size(count)
        if count:
            self._values.encode(values, out[first : first + size])
        if residual is not None and count:
            read = self._values.decode(out[first : first + size], count, 0, count).to(residual.dtype)
            if places is None:
                residual.sub_(read)
            else:
                residual[places] = gradient[places] - read
        return first + _aligned(size)

    # ---- a server's end ---------------------------------------------------------------------------------------------

    def check(self, data: torch.Tensor, held: Sequence[Piece], present: Sequence[int]) -> None:
        """Check that these bytes are a shard's gradients.

        Raises:
            ValueError: they are not; the message gives the reason.
        """
        for piece, places, count, _ in self._sections(data, held, present):
            if count not in (_NOT_FINITE, piece.size):
                read_places(places, count, piece.size)

    def add(
        self, data: torch.Tensor, held: Sequence[Piece], present: Sequence[int], total: torch.Tensor, weight: float
    ) -> None:
        """Add gradients, times their weight, to a sum; the bytes were checked, and only read."""
        for piece, places, count, values in self._sections(data, held, present):
            into = total.narrow(0, piece.at, piece.size)
            if count == _NOT_FINITE:
                into.fill_(float("nan"))
                continue
            where = None if count == piece.size else read_places(places, count, piece.size)
            for start in range(0, count, ADDED):
                stop = min(start + ADDED, count)
                block = self._values.decode(values, count, start, stop)
                if where is None:
                    into[start:stop].add_(block, alpha=weight)
                else:
                    into.index_add_(0, where[start:stop], block.to(into.dtype), alpha=weight)

    def _sections(
        self, data: torch.Tensor, held: Sequence[Piece], present: Sequence[int]
    ) -> Iterator[tuple[Piece, torch.Tensor, int, torch.Tensor]]:
        """Return each present piece with its places' bytes, their number, and its values' bytes."""
        at = 0
        for piece, there in zip(held, present, strict=True):
            if not there:
                continue
            total = piece.size
            if at + _HEAD > data.numel():
                raise ValueError("the bytes end within a piece")
            count = int(data[at : at + _HEAD].view(torch.int32)[0])
            if count != _NOT_FINITE and not 0 <= count <= most(self.how, total):
                raise ValueError(f"{count} elements of a piece of {total}")
            places = places_size(max(0, count), total) if count != _NOT_FINITE else 0
            size = self._values.size(count) if count > 0 else 0
            first = at + _HEAD + _aligned(places)
            if first + _aligned(size) > data.numel():
                raise ValueError("the bytes end within a piece")
            yield piece, data[at + _HEAD : at + _HEAD + places], count, data[first : first + size]
            at = first + _aligned(size)
        if at != data.numel():
            raise ValueError(f"{data.numel() - at} bytes too many")


def coder(how: Compression, dtype: torch.dtype) -> Coder | None:
    """Return the coder for gradients of a dtype; None: they are sent uncoded (complex ones always are)."""
    return None if how.off or not dtype.is_floating_point else Coder(how, dtype)


def narrow(how: Compression, update: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which sums of gradients are sent back to workers that step; None: their own.

    Values that servers step, and start values, are always sent in their own dtype.
    """
    wanted = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(how.halves)
    fits = dtype in (torch.float32, torch.float64) and update == "worker"
    return wanted if fits else None


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round values in place to another type's precision; return them."""
    for start in range(0, values.numel(), ADDED):
        block = values[start : start + ADDED]
        block.copy_(block.to(dtype))
    return values


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual of gradients of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
