"""A worker's cache of one table: rows that it has read, with its own pushes that servers may not have applied yet.

SSP's cache rule (Ho and others 2013): a row with clock r, which holds all updates of r clocks, may be read at clock c
iff r >= c - s. Read-my-writes: a push is reduced into the cached row at once; rows received from a server are reduced
with the own pushes that the server had not applied when it sent them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from psctl.ps.tables.reductions import Array, Lanes
from psctl.ps.tables.row_index import Keys
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_state import ShardTable


class OwnPush(msgspec.Struct, eq=False):
    """A push of this worker's in one shard: keys ascending, and rows. `sequence`: None while it waits to be sent."""

    shard: int
    table: str
    keys: Keys
    held: Lanes
    """Holds its rows, adjacent, from the `first` on, perhaps with others."""
    clock: int
    sequence: int | None = None
    first: int = 0

    @property
    def lanes(self) -> Lanes:
        """Its rows."""
        return self.held.at(slice(self.first, self.first + len(self.keys)))


class RowCache:
    """Rows of one table that were read.

    Args:
        kind: the table's.
    """

    def __init__(self, kind: TableKind) -> None:
        self.kind = kind
        self.forget()

    def forget(self) -> None:
        """Drop all rows."""
        self._table = ShardTable(self.kind, cache=True)
        self._clocks: Keys = np.zeros(0, dtype=np.int64)  # by slot: the row's clock
        self._shards: Keys = np.zeros(0, dtype=np.int64)  # by slot: the row's shard
        self._watched: Array = np.zeros(0, dtype=bool)  # by slot: whether the shard's primary sends the row on change

    def readable(self, keys: Keys, clock: int, floors: Array | None) -> Array:
        """Return which rows may be read when rows of `clock` are needed.

        Args:
            floors: by shard, the clock of all watched rows that were not sent again (eager); None: lazy.
        """
        slots = self._table.rows.find(keys)
        present = slots >= 0
        if not present.any():
            return present
        slots = np.maximum(slots, 0)
        clocks = self._clocks[slots]
        if floors is not None:
            clocks = np.where(self._watched[slots], np.maximum(clocks, floors[self._shards[slots]]), clocks)
        found: Array = present & (clocks >= clock)
        return found

    def read(self, keys: Keys) -> Lanes:
        """Return rows that are `readable`."""
        return self._table.read(keys)[1]

    def add_rows(self, shard: int, keys: Keys, present: Array, lanes: Lanes, clock: int, watched: Array) -> None:
        """Cache rows of a shard that include own pushes; absent rows are not cached.

        Args:
            watched: which rows the server has, and so sends when they are newer (eager).
        """
        keys, watched, rows = keys[present], watched[present], self._table.rows
        slots = rows.find(keys)
        new = slots < 0
        if new.any():
            slots[new] = rows.add(keys[new])
        if len(self._clocks) < len(rows):
            capacity, held = 2 * len(rows), len(self._clocks)
            self._clocks = np.concatenate([self._clocks, np.zeros(capacity - held, dtype=np.int64)])
            self._shards = np.concatenate([self._shards, np.zeros(capacity - held, dtype=np.int64)])
            self._watched = np.concatenate([self._watched, np.zeros(capacity - held, dtype=bool)])
        rows.lanes.put(torch.from_numpy(slots), lanes.at(torch.from_numpy(present)))
        self._clocks[slots], self._shards[slots], self._watched[slots] = clock, shard, watched

    def drop_older(self, clock: int) -> None:
        """Drop rows that are older than `clock`, when they are most of those here: they are not read again."""
        count = len(self._table.rows)
        kept = np.flatnonzero(self._clocks[:count] >= clock)
        if not len(kept):
            self.forget()
        elif 2 * len(kept) < count:
            keys, lanes = self._table.rows.keys[kept].copy(), self._table.rows.lanes.at(torch.from_numpy(kept))
            clocks, shards, watched = self._clocks[kept], self._shards[kept], self._watched[kept]
            self.forget()
            slots = self._table.rows.add(keys)
            self._table.rows.lanes.put(torch.from_numpy(slots), lanes)
            self._clocks, self._shards, self._watched = (np.zeros_like(each) for each in (clocks, shards, watched))
            self._clocks[slots], self._shards[slots], self._watched[slots] = clocks, shards, watched

    def add_own(self, own: OwnPush) -> None:
        """Reduce an own push into its rows that are cached."""
        present = self._table.rows.find(own.keys) >= 0
        if present.any():
            self._table.push(own.keys[present], own.lanes.at(torch.from_numpy(present)))

    def unwatch(self, shard: int) -> None:
        """Note that a shard's primary has begun a new session and sends no changed rows until they are read again."""
        self._watched[self._shards == shard] = False


def overlay(
    kind: TableKind, keys: Keys, present: Array, lanes: Lanes, own_pushes: Iterable[OwnPush]
) -> tuple[Array, Lanes]:
    """Return rows of a server combined with own pushes that it had not applied.

    Args:
        keys: of the rows, in any order.
        there: which rows the server has.
        lanes: the rows; not changed.
        owns: the pushes, oldest first.
    """
    copied = False
    for own in own_pushes:
        if not len(own.keys):
            continue
        at = np.searchsorted(own.keys, keys)
        at[at == len(own.keys)] = 0
        mine = own.keys[at] == keys
        if not mine.any():
            continue
        if not copied:
            present, copied = present.copy(), True
            lanes = lanes.copy()
        rows = torch.from_numpy(np.flatnonzero(mine))
        pushed = own.lanes.at(torch.from_numpy(at[mine]))
        lanes.put(rows, kind.after_push(lanes.at(rows), present[mine], pushed, keys[mine]))
        present[mine] = True
    return present, lanes
