"""Pieces: the parts of parameters that lie in one shard, as views of the flat buffer.

All positions follow from the layout and the shards alone, so worker and server agree without any message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from psctl.grouping import grouped
from psctl.ps.shards import offsets
from psctl.types import Layout, Range, Shard


class Piece(msgspec.Struct, frozen=True):
    """The part of one parameter that lies in one shard."""

    parameter: int  # index into layout.parameters
    within: int  # its first element, of the parameter laid flat
    at: int  # its first element, of the shard
    size: int  # elements


def pieces(layout: Layout, shards: Sequence[Shard]) -> list[list[Piece]]:
    """Return the pieces of each shard, in flat order; every element of every trainable parameter is in exactly one.

    A parameter without elements is one empty piece, in the first shard that touches its place.
    """
    starts = offsets(layout)
    by_dtype = grouped((shard.dtype, shard) for shard in sorted(shards, key=lambda shard: shard.range))
    found: dict[int, list[Piece]] = {shard.index: [] for shard in shards}
    cursor = dict.fromkeys(by_dtype, 0)
    for index, parameter in enumerate(layout.parameters):
        start = starts[index]
        if start is None:
            continue
        line, whole = by_dtype[parameter.dtype], Range(start, start + parameter.size)
        if parameter.size == 0:
            home = next(shard for shard in line if shard.range.start <= start <= shard.range.stop)
            found[home.index].append(Piece(index, 0, start - home.range.start, 0))
            continue
        at_shard = cursor[parameter.dtype]
        while line[at_shard].range.stop <= start:
            at_shard += 1
        cursor[parameter.dtype] = at_shard
        while at_shard < len(line) and line[at_shard].range.start < whole.stop:
            shard = line[at_shard]
            part = whole.meet(shard.range)
            if len(part):
                found[shard.index].append(Piece(index, part.start - start, part.start - shard.range.start, len(part)))
            at_shard += 1
    return [found[shard.index] for shard in shards]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by its name without "torch."; the name comes from a layout that was checked."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    return dtype


class Stretch(NamedTuple):
    """A part of a buffer, as elements and as bytes; made once for all clocks, as torch takes microseconds."""

    tensor: torch.Tensor
    bytes: memoryview


def stretch(tensor: torch.Tensor) -> Stretch:
    """Return a tensor that is contiguous, one-dimensional and on the CPU, with its own memory as bytes."""
    return Stretch(tensor, bytes_view(tensor))


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's own memory as bytes; it must be contiguous, one-dimensional and on the CPU."""
    return tensor.detach().view(torch.uint8).numpy().data
