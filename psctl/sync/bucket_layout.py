"""The division of a model's gradients into buckets, and the memory of their vectors while sizes are tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from psctl.collectives.allreduce_backends import AllReduceBackend
from psctl.types import BUCKET, FIRST_BUCKET

SIZES = (BUCKET, 1_000_000, 4_000_000, 10_000_000, 100_000_000)
"""Bytes of buckets that `sync.bucket: auto` tries; the usual size first, which is taken where others give the same
buckets."""

ALIGNMENT = 64
"""Bytes; a vector begins at a multiple, as memory of its own does."""


def buckets(
    parameters: Sequence[nn.Parameter], first: int = FIRST_BUCKET, size: int = BUCKET, apart: Collection[int] = ()
) -> list[list[int]]:
    """Put parameters into buckets of one type and device, last parameters first.

    Args:
        parameters: in the model's order.
        first: bytes of the first bucket that is sent, unless `size` is less.
        size: bytes of the others; a larger parameter has a bucket of its own.
        apart: indices of parameters that are alone in their buckets, none of which is the last; not of all parameters.
    """
    done: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for at in reversed(range(len(parameters))):
        if at in apart:
            done.append([at])
            continue
        parameter = parameters[at]
        kind = (parameter.dtype, parameter.device)
        open_buckets.setdefault(kind, []).append(at)
        filled[kind] = filled.get(kind, 0) + parameter.numel() * parameter.element_size()
        if filled[kind] >= (size if done else min(first, size)):
            done.append(open_buckets.pop(kind))
            del filled[kind]
    done += open_buckets.values()
    last = max(place for place, bucket in enumerate(done) if bucket[0] not in apart)
    return [*done[:last], *done[last + 1 :], done[last]]


def different_sizes(
    parameters: Sequence[nn.Parameter], sizes: Sequence[int], apart: Collection[int] = ()
) -> tuple[int, ...]:  # fmt: skip
    """Return the sizes that give different buckets, in order; of several that give the same, the first."""
    found: dict[int, list[list[int]]] = {}
    for size in sizes:
        made = buckets(parameters, size=size, apart=apart)
        if made not in found.values():
            found[size] = made
    return tuple(found)


class BucketSpace:
    """Memory in which the vectors of one division after another lie.

    Memory that other processes read is never returned to the system, so another division in memory of its own would
    keep that of all divisions.

    Args:
        backend: makes the memory.
        needs: bytes on each device for the division that needs most.
    """

    def __init__(self, backend: AllReduceBackend, needs: Mapping[torch.device, int]) -> None:
        self._space = {device: backend.buffer(size, torch.uint8, device) for device, size in needs.items()}
        self._used = dict.fromkeys(needs, 0)

    def begin(self) -> None:
        """Begin a division: vectors of the former one are not used any more."""
        self._used = dict.fromkeys(self._space, 0)

    def vector(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a vector of zeros of the present division."""
        start, size = self._used[device], length * dtype.itemsize
        self._used[device] = start + padded(size)
        return self._space[device][start : start + size].view(dtype).zero_()


def padded(size: int) -> int:
    """Return the bytes that a vector takes in a `BucketSpace`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
