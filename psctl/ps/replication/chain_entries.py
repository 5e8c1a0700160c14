"""The entries of one shard that another server may still need, and how entries and copies become messages."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.ps.messages import LARGE, PART, Forward, ForwardPart, StateEnd, StatePart
from psctl.ps.outputs import ChainOutput, ToServer
from psctl.ps.replication.replicated_state import ReplicatedState


class EntryLog:
    """By number; their payloads are the machine's again when they are dropped.

    Args:
        shard: its index.
        machine: whose they are.
    """

    def __init__(self, shard: int, machine: ReplicatedState) -> None:
        self._shard, self._machine = shard, machine
        self._log: dict[int, tuple[bytes, memoryview]] = {}

    def add(self, number: int, head: bytes, payload: memoryview) -> None:
        """Keep an entry."""
        self._log[number] = (head, payload)

    def lowest(self, default: int) -> int:
        """Return the oldest number that is kept."""
        return min(self._log, default=default)

    def since(self, number: int) -> list[int]:
        """Return the numbers that are kept, from `number` on."""
        return sorted(known for known in self._log if known >= number)

    def drop_below(self, number: int) -> None:
        """Let go of entries that nobody can ask for any more."""
        for known in [known for known in self._log if known < number]:
            self._machine.release(self._log.pop(known)[1])

    def clear(self) -> None:
        """Let go of all."""
        for known in list(self._log):
            self._machine.release(self._log.pop(known)[1])

    def messages(self, server: int, number: int, epoch: int) -> list[ChainOutput]:
        """Return what brings an entry to a server."""
        head, payload = self._log[number]
        begin = Forward(self._shard, number, epoch, len(payload), head)
        outputs: list[ChainOutput] = [ToServer(server, begin, payload[:LARGE] or None)]
        for offset in range(LARGE, len(payload), LARGE):
            outputs.append(ToServer(server, ForwardPart(self._shard, number, offset), payload[offset : offset + LARGE]))
        return outputs


COPIED = 1 << 29
"""Bytes that copies under way may take at most, by their upper bounds (a shard's is some five times its size)."""


class CopyBudget:
    """How much one server copies to others at a time, over all of its shards: entries and answers must get through.

    Args:
        most: bytes; a copy that is larger goes alone.
    """

    def __init__(self, most: int = COPIED) -> None:
        self._most = most
        self._under_way: dict[tuple[int, int], int] = {}  # (shard, server) -> bytes

    def start(self, shard: int, server: int, size: int) -> bool:
        """Tell whether a copy may begin; it counts until `end`."""
        others = sum(size for key, size in list(self._under_way.items()) if key != (shard, server))
        if others and others + size > self._most:
            return False
        self._under_way[shard, server] = size
        return True

    def finish(self, shard: int, server: int) -> None:
        """A copy has arrived, or will not."""
        self._under_way.pop((shard, server), None)


def copy_messages(server: int, shard: int, data: Sequence[memoryview]) -> list[ChainOutput]:
    """Return what follows a CopyBegin or HandOver."""
    outputs: list[ChainOutput] = []
    base = 0
    for one in data:
        for offset in range(0, len(one), PART):
            outputs.append(ToServer(server, StatePart(shard, base + offset), one[offset : offset + PART]))
        base += len(one)
    return [*outputs, ToServer(server, StateEnd(shard))]
