"""A push while it comes in and until it is summed, and what of a shard's pushes goes to a new primary.

What is handed over: a head (Handed), the sum under way if there is one, and the bytes of the pushes, in their order.
"""

from __future__ import annotations

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import StepOrder
from psctl.ps.pieces import bytes_view


class StagedPush:
    """A push while it comes in and until the sum takes it; a `lent` one stands in the worker's own memory.

    `covers`: whose host sum it is; (): its sender's alone. `view`: the buffer's bytes, where they are known.
    """

    def __init__(
        self, weight: float, present: bytes, expected: int, buffer: torch.Tensor, covers: tuple[int, ...] = (), *,
        lent: bool = False, view: memoryview | None = None,
    ) -> None:  # fmt: skip
        self.weight, self.present, self.expected, self.covers, self.lent = weight, present, expected, covers, lent
        self.filled = expected if lent else 0
        self.void = False  # it counts no more, and its bytes are still coming in
        self.buffer = buffer
        self.bytes = bytes_view(buffer) if view is None else view

    @property
    def whole(self) -> bool:
        """Whether all bytes are here."""
        return self.filled == self.expected


class TransferredPush(msgspec.Struct, frozen=True):
    """A staged push as it is handed over; its bytes follow when any piece is present."""

    clock: int
    rank: int
    weight: float
    present: bytes
    size: int
    covers: tuple[int, ...] = ()


class StagedTransfer(msgspec.Struct, frozen=True):
    """What is handed over: the vector clock, orders (by clock and rank), staged pushes, saves, the sum under way."""

    taken: dict[int, int]
    orders: list[tuple[int, StepOrder]]
    pushes: list[TransferredPush]
    saves: list[int]
    summed: int = -1  # hosts and single ranks in the sum (host_sums.in_turn); -1: there is none
    weight: float = 0.0
    joint: bytes = b""
    divided: bool = False
    covered: tuple[int, ...] = ()  # ranks in the sum that came in host sums


_HANDED = msgspec.msgpack.Decoder(StagedTransfer)


def read_handed(head: bytes, shard: int) -> StagedTransfer:
    """Return what another server's head of a hand-over says.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _HANDED.decode(head)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"shard {shard}: no hand-over: {error}") from error
