"""Forwards the values of shards within a rack, so that they cross between racks once.

Theory. Under sums by rack the collector of a shard (host_collection.py) also pulls for the others of its group: they
send it ValuesWanted in the place of a Pull, and it sends the Values that it receives itself. A worker that has no
connection to the collector pulls from the server, also what it has asked the collector for when that connection ends;
values are the same from both, and a version that arrives twice is dropped. So nobody waits for a message that is never
sent: a collector pulls every clock itself, because under bsp all workers do.

The newest version is copied, because the collector's own buffers may be changed by its script while it is being sent.
"""

from __future__ import annotations

import msgspec
import torch

from psctl.ps.dense.client.host_collection import ToPeer
from psctl.ps.messages import Values, ValuesWanted
from psctl.ps.pieces import bytes_view


class _NewestValues(msgspec.Struct, frozen=True):
    """The newest version of a shard, as its server sent it, and a copy of its bytes."""

    head: Values
    data: torch.Tensor


class ValueRelay:
    """The state machine of a collector's forwarding. Calls must not overlap."""

    def __init__(self) -> None:
        self._newest: dict[int, _NewestValues] = {}  # by shard
        self._wanted: dict[int, dict[int, ValuesWanted]] = {}  # by shard, by rank: unanswered

    def on_wanted(self, rank: int, shard: int, message: ValuesWanted) -> list[ToPeer]:
        """Answer a worker that wants a shard, now or when the values have arrived."""
        newest = self._newest.get(shard)
        if newest is None or newest.head.clocks < message.oldest:
            self._wanted.setdefault(shard, {})[rank] = message
            return []
        return [_forward(rank, message, newest)]

    def on_values(self, head: Values, values: torch.Tensor) -> list[ToPeer]:
        """Copy values that have arrived, and forward them to those that wait for them.

        Args:
            head: the message that they came with.
            values: of the shard, in the dtype in which they were sent.
        """
        newest = self._newest[head.shard] = _NewestValues(head, values.clone())
        waiting = self._wanted.get(head.shard, {})
        ready = {rank: wanted for rank, wanted in waiting.items() if head.clocks >= wanted.oldest}
        for rank in ready:
            del waiting[rank]
        return [_forward(rank, wanted, newest) for rank, wanted in sorted(ready.items())]

    def on_peer_disconnected(self, rank: int) -> None:
        """Forget what a worker waits for: it pulls from the servers."""
        for waiting in self._wanted.values():
            waiting.pop(rank, None)


def _forward(rank: int, wanted: ValuesWanted, newest: _NewestValues) -> ToPeer:
    head = msgspec.structs.replace(newest.head, clock=wanted.clock, at=None)
    return ToPeer(rank, head, bytes_view(newest.data))
