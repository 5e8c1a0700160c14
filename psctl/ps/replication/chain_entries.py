"""The entries of one shard that followers may still need, the limit on copies, and payloads that are arriving."""

from __future__ import annotations

import math

import msgspec

from psctl.ps.messages import Forward, LeadTransfer, StateCopy
from psctl.ps.outputs import ToServer
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

    def message(self, server: int, number: int, epoch: int) -> ToServer:
        """Return the message that sends an entry to a server."""
        head, payload = self._log[number]
        return ToServer(server, Forward(self._shard, number, epoch, head), payload or None)


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


class IncomingPayload(msgspec.Struct):
    """The payload of a message that is arriving; `void`: it is dropped when it has arrived."""

    message: Forward | StateCopy | LeadTransfer
    buffer: memoryview
    void: bool = False


class IncomingPayloads:
    """Receives from each server one message with a payload at a time, and expects at most one entry and one copy (or
    transfer) from all servers: the newest.

    A buffer of the machine is released when no bytes arrive in it any more: all have, or the connection is lost.

    Args:
        machine: provides the buffers for entries.
    """

    def __init__(self, machine: ReplicatedState) -> None:
        self._machine = machine
        self._arriving: dict[int, IncomingPayload] = {}  # by sender

    def expect(self, server: int, message: Forward | StateCopy | LeadTransfer, size: int) -> memoryview:
        """Expect this message, and no other entry or no other copy; return the buffer for its payload."""
        if isinstance(message, Forward):
            self.drop_entries()
            buffer = self._machine.entry_buffer(message.head, size)
        else:
            self.drop_copies()
            buffer = memoryview(bytearray(size))
        self._arriving[server] = IncomingPayload(message, buffer)
        return buffer

    def drop_entries(self, epoch: float = math.inf) -> None:
        """Drop the entry that is arriving, if it was sent under an assignment older than `epoch`."""
        for each in self._arriving.values():
            each.void = each.void or (isinstance(each.message, Forward) and each.message.epoch < epoch)

    def drop_copies(self, epoch: float = math.inf) -> None:
        """Drop the copy that is arriving, if it was sent under an assignment older than `epoch`."""
        for each in self._arriving.values():
            each.void = each.void or (not isinstance(each.message, Forward) and each.message.epoch < epoch)

    def finish(self, server: int) -> memoryview | None:
        """Return the payload that has arrived from a server; None when it is not expected any more."""
        arrived = self._arriving.pop(server, None)
        if arrived is not None and arrived.void:
            self._release(arrived)
        return None if arrived is None or arrived.void else arrived.buffer

    def on_server_disconnected(self, server: int) -> None:
        """Drop what a server was sending."""
        arriving = self._arriving.pop(server, None)
        if arriving is not None:
            self._release(arriving)

    def _release(self, arriving: IncomingPayload) -> None:
        if isinstance(arriving.message, Forward):
            self._machine.release(arriving.buffer)
