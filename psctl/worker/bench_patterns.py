"""Vectors with known sums, by which `bench` checks the results of a strategy.

Rank r's vector repeats a block of BLOCK numbers, a prime, so that a misplaced chunk is detected. Sums of whole numbers
of this size are exact in float32 in any order. Sums of fractions depend on the order, so they detect differing bits
between ranks; they must be within world * eps * (sum of magnitudes) of the true sum.
"""

from __future__ import annotations

import zlib

import torch

BLOCK = 1009


def whole(rank: int) -> torch.Tensor:
    """Return the block of whole numbers of a rank."""
    return ((torch.arange(BLOCK) * (2 * rank + 1) + 31 * rank) % 61 - 30).to(torch.float32)


def fractions(rank: int) -> torch.Tensor:
    """Return the block of fractions of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BLOCK, generator=generator, dtype=torch.float32)


def repeat_block(block: torch.Tensor, length: int) -> torch.Tensor:
    """Return a vector of so many elements that repeats the block."""
    return block.repeat(-(-length // BLOCK))[:length].contiguous()


def exact(found: torch.Tensor, world: int, mean: bool = False) -> bool:
    """Whether a vector is the sum of all ranks' whole numbers.

    Args:
        found: the vector.
        world: number of ranks.
        mean: it is their mean, whose division rounds.
    """
    expected = sum((whole(rank) for rank in range(world)), torch.zeros(BLOCK))
    if mean:
        return _within(found, expected.double() / world, expected.abs().double() * (4 * _eps() / world))
    return _within(found, expected.double(), torch.zeros(BLOCK, dtype=torch.float64))


def close(found: torch.Tensor, world: int, roundings: int = 0) -> bool:
    """Whether a vector is the sum of all ranks' fractions, as near as float32 comes in any order.

    Args:
        found: the vector.
        world: number of ranks.
        roundings: how often it was rounded beyond the sums (a mean that was multiplied back).
    """
    blocks = [fractions(rank).double() for rank in range(world)]
    expected = sum(blocks, torch.zeros(BLOCK, dtype=torch.float64))
    magnitudes = sum((block.abs() for block in blocks), torch.zeros(BLOCK, dtype=torch.float64))
    return _within(found, expected, magnitudes * ((world + roundings) * _eps()))


def bits(found: torch.Tensor) -> int:
    """Return a number that differs where two vectors differ in a bit."""
    return zlib.crc32(found.detach().cpu().numpy().view("u1").data)


def _eps() -> float:
    return torch.finfo(torch.float32).eps


def _within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> bool:
    """Compare with a repeated block, a part of the vector at a time."""
    low, high = (expected - bound).to(found.device), (expected + bound).to(found.device)
    step = BLOCK * 4096
    for start in range(0, found.numel(), step):
        part = found[start : start + step]
        even = part.numel() // BLOCK * BLOCK
        rows, rest = part[:even].view(-1, BLOCK).double(), part[even:].double()
        if not bool(((rows >= low) & (rows <= high)).all()):
            return False
        if not bool(((rest >= low[: rest.numel()]) & (rest <= high[: rest.numel()])).all()):
            return False
    return True
