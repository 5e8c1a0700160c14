"""Batches of single rows: pushes of one key each, and reads of one key, that are sent in one message.

Group commit (DeWitt and others 1984), with Nagle's rule for the moment (RFC 896): when no push (or read) is
unanswered, a new one is sent at once; later ones wait, and are sent as one message when the answer arrives, when a
caller waits for one of them, when a message must be sent that has to follow them, or when BATCH_BYTES wait. No timer
is involved.

Each push has a sequence of its own, because the grouping is not reproducible: a worker that replays a step may group
them differently, and a shard that applied a part of a group before drops exactly that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from psctl.ps.table_messages import UpdateSection
from psctl.ps.tables.client.calls_in_flight import ShardChange
from psctl.ps.tables.client.row_cache import OwnPush
from psctl.ps.tables.reductions import Lanes, array_of
from psctl.ps.tables.row_index import FIRST_ONLY, Keys, rounds, shard_of, shard_of_one
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import Allocate, PayloadReader, PayloadWriter, lanes_size, padded

BATCH_BYTES = 1 << 20
"""Most bytes of rows that wait."""

CAPACITY = 16
"""Initial capacity of a table's batch in rows."""


class BatchedRows:
    """Pushed rows of one table that wait, in the order in which they were pushed."""

    def __init__(self, kind: TableKind) -> None:
        self.kind = kind
        self.keys: list[int] = []
        self.numbers: list[int] = []
        """The sequence of each push."""
        self._reserve(CAPACITY)

    def _reserve(self, capacity: int) -> None:
        self.lanes = self.kind.buffer(capacity, self.kind.extra)
        self.array = array_of(self.lanes.values)  # writing a row through numpy takes a tenth of the time of torch

    def append(self, key: int, lanes: Lanes, number: int) -> None:
        """Add a copy of one row."""
        at = len(self.keys)
        if at == len(self.array):
            full = self.lanes
            self._reserve(4 * at)
            self.lanes.put(torch.arange(at), full)
        self.array[at] = array_of(lanes.values)
        if self.lanes.extra is not None and lanes.extra is not None:
            self.lanes.extra[at] = lanes.extra[0]
        self.keys.append(key)
        self.numbers.append(number)


class PushBatch:
    """Single-key pushes that wait.

    Args:
        allocate: returns memory for a message.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.tickets: list[int] = []
        self.bytes = 0
        self._tables: dict[str, BatchedRows] = {}

    def add(self, kind: TableKind, key: int, lanes: Lanes, number: int, ticket: int) -> None:
        """Add a copy of a row.

        Args:
            kind: the table's.
            key: the row's.
            lanes: one row.
            number: the push's sequence.
            ticket: finished when the push is done.
        """
        rows = self._tables.get(kind.spec.name)
        if rows is None:
            rows = self._tables[kind.spec.name] = BatchedRows(kind)
        rows.append(key, lanes, number)
        self.tickets.append(ticket)
        self.bytes += kind.row_bytes

    def take_all(
        self, shard_order: Keys, clock: int, done_before: dict[int, int]
    ) -> tuple[dict[int, list[ShardChange]], list[OwnPush], list[int], int]:
        """Remove all waiting rows.

        Args:
            shard_order: by shard: its position in the message (key_routes.py).
            clock: the worker's.
            done_before: by shard: the last push that an earlier incarnation of this worker had done there.

        Returns:
            The changes by shard, the own pushes that reads overlay, the tickets, and the bytes of the rows.
        """
        shards: dict[int, list[ShardChange]] = {}
        own_pushes: list[OwnPush] = []
        for rows in self._tables.values():
            for change, own in self._split(rows, shard_order, clock, done_before):
                shards.setdefault(change.section.shard, []).append(change)
                own_pushes += own
        tickets, size = self.tickets, self.bytes
        self._tables, self.tickets, self.bytes = {}, [], 0
        return shards, own_pushes, tickets, size

    def _split(
        self, rows: BatchedRows, shard_order: Keys, clock: int, done_before: dict[int, int]
    ) -> list[tuple[ShardChange, list[OwnPush]]]:
        """Return one table's change of each shard: sorted by key, pushes to one key in the order of their sequences."""
        kind, name = rows.kind, rows.kind.spec.name
        keys, numbers = np.array(rows.keys, dtype=np.int64), np.array(rows.numbers)
        order, shards, edges = _by_shard(name, keys, shard_order)
        keys, numbers = keys[order], numbers[order]
        counts = [stop - start for start, stop in pairwise(edges)]
        size = sum(2 * padded(8 * count) + lanes_size(rows.lanes, count) for count in counts)
        writer = PayloadWriter(size, self._allocate)
        found: list[tuple[ShardChange, list[OwnPush]]] = []
        for start, stop in pairwise(edges):
            shard, part, new = shards[start], keys[start:stop], numbers[start:stop]
            begin = writer.at
            writer.array(part)
            writer.array(new)
            first = writer.at
            writer.rows(rows.array, rows.lanes.extra, order[start:stop])
            reader = PayloadReader(writer.whole[first : writer.at].data)
            lanes = reader.lanes(stop - start, kind.spec.width, kind.dtype, kind.extra)
            section = UpdateSection(shard, name, stop - start, numbered=True)
            change = ShardChange(section, None, b"", writer.whole[begin : writer.at])
            if shard in done_before and not (unapplied := new > done_before[shard]).all():
                part, lanes = part[unapplied], lanes.at(torch.from_numpy(unapplied))
            own = [
                OwnPush(shard, name, part[at], lanes if len(at) == len(part) else lanes.at(torch.from_numpy(at)), clock)
                for at in rounds(part)
            ]
            found.append((change, own))
        return found


def _by_shard(table: str, keys: Keys, shard_order: Keys) -> tuple[Keys, Sequence[int], list[int]]:
    """Return the indices of keys by shard and key; the shard of each in that order; where each shard starts, and the
    end."""
    if len(keys) == 1:
        return FIRST_ONLY, [shard_of_one(table, int(keys[0]), len(shard_order))], [0, 1]
    shards = shard_of(table, keys, len(shard_order))
    order = np.lexsort((keys, shard_order[shards]))
    shards = shards[order]
    return order, shards.tolist(), [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(keys)]


class ReadBatch(msgspec.Struct, eq=False):
    """Reads of single rows of one table that wait."""

    kind: TableKind
    keys: list[int] = msgspec.field(default_factory=list)
    tickets: list[int] = msgspec.field(default_factory=list)
