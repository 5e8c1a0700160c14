"""The buckets in which training sends gradients: as DistributedDataParallel fills them."""

from __future__ import annotations

FIRST = 1 << 20
"""Bytes of the first bucket, which leaves as soon as the last layers' gradients are there."""

BUCKET = 25 << 20
"""Bytes of the others."""


def buckets(size: int) -> tuple[int, ...]:
    """Return the bytes of each bucket of `size` bytes of gradients, in the order in which they leave.

    Parameters are not cut, so true buckets differ by up to the largest parameter.
    """
    if size <= FIRST:
        return (size,)
    whole, rest = divmod(size - FIRST, BUCKET)
    return (FIRST, *(BUCKET for _ in range(whole)), *((rest,) if rest else ()))
