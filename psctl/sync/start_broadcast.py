"""The start values of rank 0, given to all ranks over the data plane: down the plan's trees, or as a sum with zeros.

The sum needs no further schedule, but its messages carry zeros beside the values. So where the plan finds a broadcast
faster whose messages run between ranks that the sums connect, it is in the decision (`plan/collective_choice.py`):
packed trees where links differ or are shared, else a chain or a tree (Wang and others, Blink: Fast and Generic
Collectives for Distributed ML, MLSys 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import torch

from psctl.collectives.allreduce_backends import ScheduleAllReduce, broadcast
from psctl.collectives.player import SchedulePlayer
from psctl.job.training_messages import CollectiveChoice
from psctl.schedule.algorithms import collectives
from psctl.schedule.algorithms.catalog import ScheduleOptions

PIECE = 64 << 20
"""Bytes that are given at once, in memory of their own."""


def give_start_values(
    backend: ScheduleAllReduce, me: int, start: CollectiveChoice | None, tensors: Sequence[torch.Tensor]
) -> None:  # fmt: skip
    """Overwrite these tensors with rank 0's, bit by bit; before any sum is begun.

    Args:
        backend: of the sums.
        me: this rank.
        start: the broadcast of the decision; None: a sum with zeros.
        tensors: the same shapes and types on every rank; on the host.

    Raises:
        PeerLost: a rank is lost.
    """
    if start is None:
        broadcast(backend, me == 0, tensors)
        return
    options = msgspec.convert(start.options, ScheduleOptions)
    schedule = collectives.build("broadcast", backend.world, start.algorithm, options=options)
    player = SchedulePlayer(schedule, me, backend.plane, what="the start values")
    with torch.no_grad():
        wholes = [each.detach() for each in tensors if each.numel()]
        copies = [each.contiguous() for each in wholes]
        flat = [each.view(-1).view(torch.uint8) for each in copies]
        space = backend.plane.buffer(min(PIECE, sum(each.numel() for each in flat)), torch.uint8)
        for parts in _pieces(flat, len(space)):
            used = space[: sum(each.numel() for each in parts)]
            places = _places(used, parts)
            if me == 0:
                for place, part in zip(places, parts, strict=True):
                    place.copy_(part)
            player.play(used)
            if me != 0:
                for place, part in zip(places, parts, strict=True):
                    part.copy_(place)
        backend.plane.memory.release([space])
        for whole, copy in zip(wholes, copies, strict=True):
            if copy.data_ptr() != whole.data_ptr():
                whole.copy_(copy)


def _places(space: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ends = list(accumulate(each.numel() for each in parts))
    return [space[end - each.numel() : end] for end, each in zip(ends, parts, strict=True)]


def _pieces(flat: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Yield views of these tensors of bytes, in groups of `size` bytes; the last one has what is left."""
    group: list[torch.Tensor] = []
    left = size
    for each in flat:
        at = 0
        while at < each.numel():
            taken = min(left, each.numel() - at)
            group.append(each[at : at + taken])
            at, left = at + taken, left - taken
            if not left:
                yield group
                group, left = [], size
    if group:
        yield group
