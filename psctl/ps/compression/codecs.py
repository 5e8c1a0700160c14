"""Codecs of values: uncompressed, in 16 bits, in 8 bits with a scale, in one bit with a scale.

    codec    bytes a value    decoded value of x
    raw      4 (or 8)         x
    half     2                the nearest bfloat16 or float16; float16 overflows to infinity above 65504
    int8     1 + 4/1024       s k with the nearest integer k in -127..127; s: the block's largest magnitude / 127
    onebit   1/8 + 4/1024     s sign(x); s: the block's mean magnitude

Theory. The error of int8 is at most s/2. The mean magnitude is the scale with the least squared error of a sign; it
removes the share (mean |x|)^2 / mean x^2 of the block's energy, so a block's error is never larger than that of
zeros: with error feedback (error_feedback.py) both converge as uncompressed SGD does (Karimireddy and others 2019).
Scales belong to blocks of 1024 values, so that one large value makes few others inexact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

BLOCK = 1024
"""Values that share a scale."""

_SCALE = 4  # bytes

_LEAST = 1e-37
"""A scale below this has no finite inverse: its block counts as zeros."""


class ValueCodec(ABC):
    """A stateless codec of values: the same values give the same bytes."""

    largest = float("inf")
    """Magnitude above which a finite value is decoded as infinite."""

    @abstractmethod
    def size(self, count: int) -> int:
        """Return the bytes of the code of `count` values."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values' code into `out`, `size` bytes that begin at a multiple of 8."""

    @abstractmethod
    def decode(self, data: torch.Tensor, count: int, start: int, stop: int) -> torch.Tensor:
        """Return the values [start, stop) of a code of `count` values; `start` is a multiple of BLOCK."""


class Raw(ValueCodec):
    """Values as they are, or rounded to another float type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self.largest = dtype, torch.finfo(dtype).max

    def size(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(self._dtype).copy_(values)

    def decode(self, data: torch.Tensor, count: int, start: int, stop: int) -> torch.Tensor:
        return data.view(self._dtype)[start:stop]


class _Scaled(ValueCodec):
    """Codes with one float32 a block before them."""

    def _scales(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return data[: _SCALE * _blocks(count)].view(torch.float32)

    def _codes(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return data[_SCALE * _blocks(count) :]

    def _spread(self, data: torch.Tensor, count: int, start: int, stop: int) -> torch.Tensor:
        """Return the scale of each of the values [start, stop)."""
        scales = self._scales(data, count)[start // BLOCK : _blocks(stop)]
        return scales.repeat_interleave(BLOCK)[: stop - start]


class Int8(_Scaled):
    """An integer in -127..127 times the block's scale."""

    def size(self, count: int) -> int:
        return _SCALE * _blocks(count) + count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        count = values.numel()
        rows = _rows(values)
        scales = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)) / 127
        self._scales(out, count).copy_(scales)
        inverse = torch.where(scales > _LEAST, 1 / scales, 0.0)
        steps = (rows * inverse.unsqueeze(1)).round_().clamp_(-127, 127)
        self._codes(out, count).view(torch.int8).copy_(steps.view(-1)[:count])

    def decode(self, data: torch.Tensor, count: int, start: int, stop: int) -> torch.Tensor:
        codes = self._codes(data, count).view(torch.int8)[start:stop]
        return self._spread(data, count, start, stop).mul_(codes)


class OneBit(_Scaled):
    """The sign, times the block's scale."""

    def size(self, count: int) -> int:
        return _SCALE * _blocks(count) + -(-count // 8)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        count, rows = values.numel(), _rows(values)
        held = torch.full((rows.shape[0],), BLOCK, dtype=rows.dtype)
        held[-1] = count - BLOCK * (rows.shape[0] - 1)
        self._scales(out, count).copy_(rows.abs().sum(dim=1) / held)
        bits = np.packbits((values >= 0).numpy())
        self._codes(out, count).copy_(torch.from_numpy(bits))

    def decode(self, data: torch.Tensor, count: int, start: int, stop: int) -> torch.Tensor:
        packed = self._codes(data, count)[start // 8 : -(-stop // 8)].numpy()
        signs = torch.from_numpy(np.unpackbits(packed, count=stop - start).astype(np.float32))
        return self._spread(data, count, start, stop).mul_(signs.mul_(2).sub_(1))


def codec(kind: str, dtype: torch.dtype) -> ValueCodec:
    """Return the codec for values.

    Args:
        kind: none, bf16, fp16, int8, onebit, topk (which selects elements and leaves their values unchanged).
        dtype: of the gradients.
    """
    match kind:
        case "int8":
            return Int8()
        case "onebit":
            return OneBit()
        case "bf16":
            return Raw(_narrower(torch.bfloat16, dtype))
        case "fp16":
            return Raw(_narrower(torch.float16, dtype))
        case _:
            return Raw(dtype)


def _narrower(wanted: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return wanted if dtype.itemsize > wanted.itemsize else dtype


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Return float32 rows of BLOCK values, the last one filled up with zeros."""
    flat = values.to(torch.float32)
    short = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, BLOCK)
