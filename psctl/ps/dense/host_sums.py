"""The order of summation of gradients, and sums over one host's ranks: the same on workers and servers.

Theory. Floating-point sums depend on their grouping, so it is fixed: first the ranks of a host, in rank order, each
times its weight (the *host sum*); then these sums and the ranks that are alone on their host, in the order of their
first ranks. So a host sum is bitwise the same whether one of its workers or the server makes it: both use `host_sum`.
Ranks that are not members of a clock are left out: the other ranks of their host form the group.

A piece for which a rank has no gradient is skipped for that rank, whatever its bytes are; where no rank of the host has
one the host sum is zero, and `present` marks it as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from psctl.grouping import grouped
from psctl.ps.pieces import Piece
from psctl.types import Range

BLOCK = 1 << 16
"""Elements that are summed at a time: they stay in the cache while the gradients of a host's ranks are added."""


class RankGradients(msgspec.Struct, frozen=True):
    """One rank's gradients of a shard, read only; each piece that is in `present` counts times `weight`."""

    rank: int
    weight: float
    present: bytes
    gradients: torch.Tensor


def in_turn(hosts: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a clock's ranks in the order of summation: those of one host together, hosts by their first ranks.

    Args:
        hosts: ranks that share a host (Terms.hosts).
        ranks: the members of the clock, ascending.
    """
    group_of = {rank: group for group in hosts for rank in group}
    return tuple(map(tuple, grouped((group_of.get(rank, (rank,)), rank) for rank in ranks).values()))


def joint_weight(weights: Iterable[float]) -> float:
    """Return the sum of weights, added one after another (Python's own `sum` rounds otherwise from 3.12 on)."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


def host_sum(out: torch.Tensor, held: Sequence[Piece], parts: Sequence[RankGradients], *, onto: bool = False) -> bytes:
    """Sum the gradients of one host's ranks; return which pieces any of them has.

    Args:
        out: where the sum is written; it may be the first part's own gradients.
        held: the shard's pieces.
        parts: in rank order.
        onto: add the host sum to what `out` holds, in the place of writing it.
    """
    present = bytes(map(any, zip(*(part.present for part in parts), strict=True)))
    for run, there in _runs(held, parts):
        among = [part for part, has in zip(parts, there, strict=True) if has]
        if among:
            _sum_run(out, run, among, onto=onto)
        elif not onto:
            out.narrow(0, run.start, len(run)).zero_()
    return present


def _runs(held: Sequence[Piece], parts: Sequence[RankGradients]) -> list[tuple[Range, tuple[int, ...]]]:
    """Return the ranges of a shard in which the same ranks have gradients."""
    runs: list[tuple[Range, tuple[int, ...]]] = []
    for piece, there in zip(held, zip(*(part.present for part in parts), strict=True), strict=True):
        if runs and runs[-1][1] == there and runs[-1][0].stop == piece.at:
            runs[-1] = Range(runs[-1][0].start, piece.at + piece.size), there
        else:
            runs.append((Range(piece.at, piece.at + piece.size), there))
    return runs


def _sum_run(out: torch.Tensor, run: Range, parts: Sequence[RankGradients], *, onto: bool) -> None:
    block = torch.empty(min(BLOCK, len(run)), dtype=out.dtype)
    weighted = torch.empty_like(block) if any(part.weight != 1.0 for part in parts) else block
    for start in range(run.start, run.stop, BLOCK):
        size = min(BLOCK, run.stop - start)
        target = out.narrow(0, start, size)
        total = block[:size] if onto else target
        for index, part in enumerate(parts):
            one = part.gradients.narrow(0, start, size)
            if part.weight != 1.0:
                one = torch.mul(one, part.weight, out=weighted[:size] if index else total)
            if index == 0:
                first = one
            else:
                torch.add(first, one, out=total)
                first = total
        if onto:
            target.add_(first)
        elif first is not target:
            target.copy_(first)
