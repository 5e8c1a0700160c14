"""The linear layers whose gradients are sent as factors: those where it takes less time.

A weight of M x N elements takes 2 (P - 1)/P M N elements of a rank in an all-reduce of P ranks. Its factors take
2 (P - 1) K (M + N): each rank's K rows of both, in one all-reduce of P K (M + N) elements, so fewer bytes where
P K (M + N) < M N (Poseidon's rule is of this form, for a broadcast among P workers and P servers). Every rank then
multiplies the P - 1 others' rows too: 2 (P - 1) K M N more floating-point operations, which are weighed against the
bytes saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.orders import HostOrder
from psctl.types import Layout

CORE = 3e10
"""Floating-point operations a second of a core in a product of float32 matrices; assumed."""

GPU = 1e13
"""The same of a GPU; assumed."""


class FactoredLayers(msgspec.Struct, frozen=True):
    """The weights whose gradients are sent as factors.

    `names` of the weights; `dense` and `factors`: bytes of their gradients, and of the vectors sent in their place.
    """

    names: tuple[str, ...] = ()
    dense: int = 0
    factors: int = 0


def operations_per_second(hosts: Sequence[HostOrder], *, on_gpus: bool) -> float:
    """Return the floating-point operations a second of the slowest rank."""
    if on_gpus:
        return GPU
    return min((CORE * max(1.0, host.cores / host.workers) for host in hosts if host.workers), default=CORE)


def factored_layers(
    layout: Layout, world: int, rows: int, width: int, seconds_per_byte: float, operations: float
) -> FactoredLayers:
    """Choose the layers.

    Args:
        layout: its linear weights are considered.
        world: number of ranks.
        rows: of a worker's batch.
        width: bytes of an element.
        seconds_per_byte: of gradients, in the all-reduce that is chosen.
        operations: floating-point operations a second of a rank.
    """
    names, dense, factors = [], 0, 0
    for each in layout.parameters:
        if not (each.linear and each.trainable):
            continue
        out, in_ = each.shape
        plain, sent = width * out * in_, width * world * rows * (out + in_)
        more = 2 * (world - 1) * rows * out * in_ / operations
        if (plain - sent) * seconds_per_byte > more:
            names.append(each.name)
            dense, factors = dense + plain, factors + sent
    return FactoredLayers(tuple(names), dense, factors)
