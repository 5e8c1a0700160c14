"""The entries of one shard that followers may still need, messages for entries and copies, and their reception.

An entry arrives in one message. A copy arrives in parts, after a message that announces its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from psctl.errors import ProtocolError
from psctl.ps.messages import PART, Forward, LeadTransfer, StateCopy, StatePart
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


def copy_messages(server: int, begin: StateCopy | LeadTransfer, data: Sequence[memoryview]) -> list[ChainOutput]:
    """Return the messages that send a copy or a transfer."""
    parts = [one[offset : offset + PART] for one in data for offset in range(0, len(one), PART)]
    return [ToServer(server, begin), *(ToServer(server, StatePart(begin.shard), part) for part in parts)]


class IncomingEntry(msgspec.Struct):
    """An entry whose payload is arriving; `void`: it is dropped when its bytes have arrived."""

    message: Forward
    buffer: memoryview
    void: bool = False


class IncomingCopy(msgspec.Struct):
    """A copy or transfer that is arriving; `data` None: it is not expected, and its bytes are dropped."""

    begin: StateCopy | LeadTransfer
    data: memoryview | None
    filled: int = 0


class IncomingTransfers:
    """Receives from each server one entry and one copy at a time, and expects at most one of each: the newest.

    A buffer of the machine is released when no bytes arrive in it any more: all have, or the connection is lost.

    Args:
        shard: its index.
        machine: provides the buffers for entries.
    """

    def __init__(self, shard: int, machine: ReplicatedState) -> None:
        self._shard, self._machine = shard, machine
        self._entries: dict[int, IncomingEntry] = {}  # by sender
        self._copies: dict[int, IncomingCopy] = {}

    def entry_buffer(self, server: int, message: Forward, size: int) -> memoryview:
        """Expect this entry, and no other; return the buffer for its payload."""
        self.drop_entries()
        buffer = self._machine.entry_buffer(message.head, size)
        self._entries[server] = IncomingEntry(message, buffer)
        return buffer

    def drop_entries(self, epoch: float = math.inf) -> None:
        """Drop the entry that is arriving, if it was sent under an assignment older than `epoch`."""
        for entry in self._entries.values():
            entry.void = entry.void or entry.message.epoch < epoch

    def finish_entry(self, server: int) -> memoryview | None:
        """Return the payload of the entry that has arrived; None when it is not expected any more."""
        entry = self._entries.pop(server, None)
        if entry is not None and entry.void:
            self._machine.release(entry.buffer)
        return None if entry is None or entry.void else entry.buffer

    def start_copy(self, server: int, message: StateCopy | LeadTransfer, limit: int, *, expected: bool) -> None:
        """Receive a copy or a transfer; if it is `expected`, no other is any more.

        Raises:
            ProtocolError: it has more than `limit` bytes; the server's fault.
        """
        if not 0 <= message.size <= limit:
            raise self._error(server, f"a copy of {message.size} bytes, more than {limit}")
        for copy in self._copies.values() if expected else ():
            copy.data = None
        self._copies[server] = IncomingCopy(message, memoryview(bytearray(message.size)) if expected else None)

    def drop_copies(self, epoch: int) -> None:
        """Drop a copy that was sent under an assignment older than `epoch`."""
        for copy in self._copies.values():
            if copy.begin.epoch < epoch:
                copy.data = None

    def copy_buffer(self, server: int, size: int) -> memoryview | None:
        """Return the buffer for the next bytes of a copy; None when they are not needed.

        Raises:
            ProtocolError: there are more than announced; nothing was changed.
        """
        copy = self._copies.get(server)
        if copy is None:
            return None
        if copy.filled + size > copy.begin.size:
            raise self._error(server, f"{copy.filled + size} bytes of a copy of {copy.begin.size}")
        return None if copy.data is None else copy.data[copy.filled : copy.filled + size]

    def add_to_copy(self, server: int, size: int) -> IncomingCopy | None:
        """Count received bytes of a copy; return the copy when it is complete."""
        copy = self._copies.get(server)
        if copy is None:
            return None
        copy.filled += size
        return self._copies.pop(server) if copy.filled >= copy.begin.size else None

    def on_server_disconnected(self, server: int) -> None:
        """Drop what a server was sending."""
        self._copies.pop(server, None)
        entry = self._entries.pop(server, None)
        if entry is not None:
            self._machine.release(entry.buffer)

    def _error(self, server: int, what: str) -> ProtocolError:
        return ProtocolError(f"server/{server}, shard {self._shard}: {what}", where=f"server/{server}")
