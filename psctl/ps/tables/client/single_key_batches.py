"""Batches of single rows: pushes of one key each, and reads of one key, that are sent in one message.

Group commit (DeWitt and others 1984), with Nagle's rule for the moment (RFC 896): when no push (or read) is
unanswered, a new one is sent at once; later ones wait, and are sent as one message when the answer arrives, when a
caller waits for one of them, when a message must be sent that has to follow them, or when ROOM bytes wait. No timer
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
from psctl.ps.tables.reductions import Array, Lanes, words_of
from psctl.ps.tables.row_index import ONE, Keys, rounds, shard_of, shard_of_one
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import Allocate, PayloadReader, PayloadWriter, lanes_size, padded

ROOM = 1 << 20
"""Most bytes of rows that wait."""

FIRST = 16
"""Initial capacity of a table in rows."""


class WaitingRows(msgspec.Struct, eq=False):
    """Rows of one table that wait, in the order in which they were pushed."""

    kind: TableKind
    lanes: Lanes
    words: Array
    """The values again, as numpy writes them: a tenth of what it takes torch."""
    keys: list[int] = msgspec.field(default_factory=list)
    numbers: list[int] = msgspec.field(default_factory=list)


def _waiting_rows(kind: TableKind, count: int) -> WaitingRows:
    lanes = kind.push_buffer(count)
    return WaitingRows(kind, lanes, words_of(lanes.values))


class PushBatch:
    """Pushes that wait.

    Args:
        allocate: returns memory for a message.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.tickets: list[int] = []
        self.bytes = 0
        self._tables: dict[str, WaitingRows] = {}

    def add(self, kind: TableKind, key: int, lanes: Lanes, number: int, ticket: int) -> None:
        """Add a copy of a row.

        Args:
            lanes: one row.
            number: its sequence.
        """
        name = kind.spec.name
        rows = self._tables.get(name)
        if rows is None:
            rows = self._tables[name] = _waiting_rows(kind, FIRST)
        keys = rows.keys
        at = len(keys)
        if at == len(rows.words):
            rows = self._tables[name] = _grown(rows)
        rows.words[at] = words_of(lanes.values)
        if rows.lanes.extra is not None and lanes.extra is not None:
            rows.lanes.extra[at] = lanes.extra[0]
        rows.keys.append(key)
        rows.numbers.append(number)
        self.tickets.append(ticket)
        self.bytes += kind.row

    def take_all(
        self, turns: Keys, clock: int, before: dict[int, int]
    ) -> tuple[dict[int, list[ShardChange]], list[OwnPush], list[int], int]:
        """Remove all waiting rows; return the pieces by shard, the own pushes that reads overlay, tickets, and bytes.

        Args:
            turns: by shard: its place in the message (key_routes.py).
            clock: the worker's.
            before: by shard: the last push that an earlier incarnation of this worker had done there.
        """
        shards: dict[int, list[ShardChange]] = {}
        owns: list[OwnPush] = []
        for rows in self._tables.values():
            _laid(rows, turns, clock, before, shards, owns, self._allocate)
        tickets, size = self.tickets, self.bytes
        self._tables, self.tickets, self.bytes = {}, [], 0
        return shards, owns, tickets, size


def _grown(rows: WaitingRows) -> WaitingRows:
    more, held = _waiting_rows(rows.kind, 4 * len(rows.words)), len(rows.words)
    more.words[:held] = rows.words
    if more.lanes.extra is not None and rows.lanes.extra is not None:
        more.lanes.extra[:held] = rows.lanes.extra
    more.keys, more.numbers = rows.keys, rows.numbers
    return more


def _laid(
    rows: WaitingRows,
    turns: Keys,
    clock: int,
    before: dict[int, int],
    shards: dict[int, list[ShardChange]],
    owns: list[OwnPush],
    allocate: Allocate,
) -> None:
    """Add one table's rows: by shard, there by key, of one key in the order in which they were pushed."""
    name, keys, numbers = rows.kind.spec.name, np.array(rows.keys, dtype=np.int64), np.array(rows.numbers)
    order, held, edges = _in_order(name, keys, turns)
    keys, numbers = keys[order], numbers[order]
    size = sum(2 * padded(8 * (stop - start)) + lanes_size(rows.lanes, stop - start)
               for start, stop in pairwise(edges))  # fmt: skip
    writer = PayloadWriter(size, allocate)
    kind, extra = rows.kind, rows.lanes.extra
    for start, stop in pairwise(edges):
        shard, part, first = held[start], keys[start:stop], writer.at
        writer.array(part)
        writer.array(numbers[start:stop])
        begin = writer.at
        writer.rows(rows.words, extra, order[start:stop])
        reader = PayloadReader(writer.whole[begin : writer.at].data)
        lanes = reader.lanes(stop - start, kind.spec.width, kind.dtype, kind.extra)
        section = UpdateSection(shard, name, stop - start, numbered=True)
        shards.setdefault(shard, []).append(ShardChange(section, None, b"", writer.whole[first : writer.at]))
        if shard in before and not (new := numbers[start:stop] > before[shard]).all():
            part, lanes = part[new], lanes.at(torch.from_numpy(new))
        for each in rounds(part):
            its = lanes if len(each) == len(part) else lanes.at(torch.from_numpy(each))
            owns.append(OwnPush(shard, name, part[each], its, clock))


def _in_order(table: str, keys: Keys, turns: Keys) -> tuple[Keys, Sequence[int], list[int]]:
    """Return the places of keys by shard and key; the shards in that order; where each begins there, and the end."""
    if len(keys) == 1:
        return ONE, [shard_of_one(table, int(keys[0]), len(turns))], [0, 1]
    held = shard_of(table, keys, len(turns))
    order = np.lexsort((keys, turns[held]))
    held = held[order]
    return order, held.tolist(), [0, *(np.flatnonzero(np.diff(held)) + 1).tolist(), len(keys)]


class ReadBatch(msgspec.Struct, eq=False):
    """Reads of single rows of one table that wait."""

    kind: TableKind
    keys: list[int] = msgspec.field(default_factory=list)
    tickets: list[int] = msgspec.field(default_factory=list)
