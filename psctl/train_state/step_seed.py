"""Random numbers that are a function of seed, clock and rank: python's, numpy's (if it is loaded) and torch's."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def mix(*parts: int | str) -> int:
    """Return 63 bits that depend on every part; equal parts give equal bits in every process and version of Python."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def reseed(*parts: int | str) -> None:
    """Seed python's, numpy's and torch's generators from `parts`."""
    seed = mix(*parts)
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
