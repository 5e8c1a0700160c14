"""The entries of one shard that followers may still need, messages for entries and copies, and their reception.

Entries and copies are received in order, and are no larger than their first message announced.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.errors import ProtocolError
from psctl.ps.messages import (
    LARGE,
    PART,
    BetweenServers,
    Forward,
    ForwardPart,
    LeadTransfer,
    StateCopy,
    StateEnd,
    StatePart,
)
from psctl.ps.outputs import ChainOutput, ToServer
from psctl.ps.replication.replica_roles import ReplicatedState


class EntryLog:
    """Entries by number; their payloads are released to the machine when they are dropped.

    Args:
        shard: its index.
        machine: the replicated state that owns the payloads.
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
        """Drop the entries that no follower can need."""
        for known in [known for known in self._log if known < number]:
            self._machine.release(self._log.pop(known)[1])

    def clear(self) -> None:
        """Drop all entries."""
        for known in list(self._log):
            self._machine.release(self._log.pop(known)[1])

    def messages(self, server: int, number: int, epoch: int) -> list[ChainOutput]:
        """Return the messages that send an entry to a server."""
        head, payload = self._log[number]
        begin = Forward(self._shard, number, epoch, len(payload), head)
        outputs: list[ChainOutput] = [ToServer(server, begin, payload[:LARGE] or None)]
        for offset in range(LARGE, len(payload), LARGE):
            outputs.append(ToServer(server, ForwardPart(self._shard, number, offset), payload[offset : offset + LARGE]))
        return outputs


COPIED = 1 << 29
"""Limit of the bytes of concurrent copies, by their upper bounds (a shard's is some five times its size)."""


class CopyBudget:
    """Limits what one server copies to others at once, over all of its shards, so that entries are not delayed.

    Args:
        most: bytes; a larger copy is made alone.
    """

    def __init__(self, most: int = COPIED) -> None:
        self._most = most
        self._under_way: dict[tuple[int, int], int] = {}  # (shard, server) -> bytes

    def start(self, shard: int, server: int, size: int) -> bool:
        """Return whether a copy may start; it counts until `finish`."""
        others = sum(size for key, size in list(self._under_way.items()) if key != (shard, server))
        if others and others + size > self._most:
            return False
        self._under_way[shard, server] = size
        return True

    def finish(self, shard: int, server: int) -> None:
        """Record that a copy has arrived, or never will."""
        self._under_way.pop((shard, server), None)


def copy_messages(server: int, shard: int, data: Sequence[memoryview]) -> list[ChainOutput]:
    """Return the messages that follow a StateCopy or LeadTransfer."""
    outputs: list[ChainOutput] = []
    base = 0
    for one in data:
        for offset in range(0, len(one), PART):
            outputs.append(ToServer(server, StatePart(shard, base + offset), one[offset : offset + PART]))
        base += len(one)
    return [*outputs, ToServer(server, StateEnd(shard))]


class IncomingTransfers:
    """Receives at most one entry and one copy at a time; a new one replaces an unfinished one.

    Args:
        shard: its index.
        machine: provides the buffers for entries.
    """

    def __init__(self, shard: int, machine: ReplicatedState) -> None:
        self._shard, self._machine = shard, machine
        self._entry: Forward | None = None
        self._room = memoryview(b"")
        self._entry_filled = 0
        self._sender = -1
        self._copy: StateCopy | LeadTransfer | None = None
        self._source = -1
        self._data = memoryview(b"")
        self._copy_filled = 0

    def open_entry(self, server: int, message: Forward) -> None:
        """Start to receive an entry."""
        self.drop_entry()
        self._room = self._machine.entry_buffer(message.head, message.size)
        self._entry, self._entry_filled, self._sender = message, 0, server

    def drop_entry(self) -> None:
        """Drop the entry that is being received."""
        if self._entry is not None:
            self._entry = None
            self._machine.release(self._room)

    def drop_older(self, epoch: int) -> None:
        """Drop the entry that is being received if it was sent under an older assignment."""
        if self._entry is not None and self._entry.epoch < epoch:
            self.drop_entry()

    def drop_copy(self, epoch: int) -> None:
        """Drop the copy that is being received if it was sent under an older assignment."""
        if self._copy is not None and self._copy.epoch < epoch:
            self._copy, self._data = None, memoryview(b"")

    def is_open(self, server: int, message: Forward) -> bool:
        """Return whether this entry is being received, from that server."""
        return self._entry == message and self._sender == server

    def open_copy(self, server: int, message: StateCopy | LeadTransfer | None) -> None:
        """Start to receive a copy or a transfer; None: one that is not expected, whose parts are dropped."""
        if message is None:
            if self._source == server:
                self._copy, self._source, self._data = None, -1, memoryview(b"")
        elif message.size <= self._machine.copy_limit:  # a correct one is not larger
            self._copy, self._source, self._copy_filled = message, server, 0
            self._data = memoryview(bytearray(message.size))

    def place(self, server: int, message: BetweenServers, size: int) -> memoryview | None:
        """Return the buffer for a payload; None when the payload is not needed.

        Raises:
            ProtocolError: it does not fit; nothing was changed.
        """
        if isinstance(message, Forward | ForwardPart):
            if self._entry is None or self._entry.number != message.number or self._sender != server:
                return None
            offset = message.offset if isinstance(message, ForwardPart) else 0
            if offset < self._entry_filled:
                return None  # a duplicate
            return self._fits(server, self._room, self._entry_filled, offset, size)
        if isinstance(message, StatePart):
            if self._copy is None or self._source != server:
                return None
            return self._fits(server, self._data, self._copy_filled, message.offset, size)
        raise ProtocolError(f"server/{server}: {type(message).__name__} with a payload", where=f"server/{server}")

    def _fits(self, server: int, whole: memoryview, filled: int, offset: int, size: int) -> memoryview:
        if offset != filled or offset + size > len(whole):
            what = f"bytes [{offset}, {offset + size}) of {len(whole)} where {filled} are"
            raise ProtocolError(f"server/{server}, shard {self._shard}: {what}", where=f"server/{server}")
        return whole[offset : offset + size]

    def entry_filled(self, server: int, message: Forward | ForwardPart, size: int) -> tuple[Forward, memoryview] | None:
        """Count an entry's bytes; return the entry once it is complete."""
        entry = self._entry
        offset = message.offset if isinstance(message, ForwardPart) else 0
        if entry is None or entry.number != message.number or self._sender != server:
            return None
        if offset != self._entry_filled:
            return None
        self._entry_filled += size
        if self._entry_filled < len(self._room):
            return None
        self._entry = None
        return entry, self._room

    def copy_filled(self, server: int, size: int) -> None:
        """Count a copy's bytes."""
        if self._source == server:
            self._copy_filled += size

    def copied(self, server: int) -> tuple[StateCopy | LeadTransfer, memoryview] | None:
        """Return the copy that has ended, if it is complete."""
        begin = self._copy
        if begin is None or self._source != server or self._copy_filled < begin.size:
            return None
        data, self._copy, self._data = self._data, None, memoryview(b"")
        return begin, data
