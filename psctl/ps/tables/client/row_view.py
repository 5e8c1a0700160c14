"""A worker's view of a store's rows: rows that it has read, combined with its own pushes, and the clock of each shard.

A row is a server's, combined with those own pushes that the server had not applied (row_cache.py). Every answer
determines them: it has the sequence of this worker's last update in the shard, and under bsp the finished clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from psctl.errors import ProtocolError
from psctl.ps.table_messages import AnswerSection, ReadSection, StoreSpec
from psctl.ps.tables.client.calls_in_flight import (
    PooledRoute,
    RangeScan,
    ReadPart,
    TableRead,
    WantedRows,
    WantedSums,
    merge_scan,
)
from psctl.ps.tables.client.key_routes import KeyRoute
from psctl.ps.tables.client.row_cache import OwnPush, RowCache, overlay
from psctl.ps.tables.reductions import array_of
from psctl.ps.tables.row_index import NO_KEYS, ascending
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import PayloadReader

ANY_CLOCK = -1
"""The clock of a read that accepts rows of any clock."""


class RowView:
    """The rows of a store as one worker sees them.

    Args:
        spec: the store's.
        kinds: its tables, as far as they are known.
    """

    def __init__(self, spec: StoreSpec, kinds: dict[str, TableKind]) -> None:
        self.clocks = [-1] * spec.shards
        """By shard: the number of clocks that all workers have finished."""
        self._spec, self._kinds = spec, kinds
        self._caches: dict[str, RowCache] = {}
        self._owns: dict[int, list[OwnPush]] = {shard: [] for shard in range(spec.shards)}

    def add_own(self, own_pushes: Sequence[OwnPush]) -> None:
        """Overlay own pushes on later reads, unless only servers can apply them."""
        for own in own_pushes:
            if not self._kinds[own.table].workers_apply:
                continue
            if own.table in self._caches:
                self._caches[own.table].add_own(own)
            self._owns[own.shard].append(own)

    def on_done(self, shard: int, sequence: int) -> None:
        """Note that a shard has all own pushes up to `sequence`; under bsp they are visible when their clock ends."""
        if self._spec.staleness != 0 and self._owns[shard]:
            self._owns[shard] = [own for own in self._owns[shard] if own.sequence is None or own.sequence > sequence]

    def forget(self, table: str) -> None:
        """Drop the cached rows of a table, which have changed."""
        if table in self._caches:
            self._caches[table].forget()

    def on_own_clock(self, oldest: int) -> None:
        """Note that this worker has ended a clock: rows older than `oldest` are not read any more, unless watched."""
        if not self._spec.eager:
            for cache in self._caches.values():
                cache.drop_older(oldest)

    def unwatch(self, shard: int) -> None:
        """Note that a shard's primary has begun a new session and sends no changed rows until they are read again."""
        for cache in self._caches.values():
            cache.unwatch(shard)

    def on_clock(self, shard: int, clock: int) -> None:
        """Note that all workers have finished `clock` clocks in a shard."""
        self.clocks[shard] = max(self.clocks[shard], clock)
        if self._spec.staleness == 0:
            self._owns[shard] = [own for own in self._owns[shard] if own.clock >= self.clocks[shard]]

    def start_read(self, parts: Iterable[tuple[TableKind, KeyRoute | range]], ticket: int, clock: int) -> TableRead:
        """Return a read with the cached rows filled in; its `shards` have the requests for the others."""
        read = TableRead(ticket, clock, [], {})
        for kind, keys in parts:
            read.wants.append(self._scan(read, kind, keys) if isinstance(keys, range) else self._want(read, kind, keys))
        return read

    def start_sums(self, route: PooledRoute, ticket: int, clock: int) -> TableRead:
        """Return a read of the sums of bags; none of it is cached."""
        want = WantedSums(route.kind, len(route.whole.lengths))
        read = TableRead(ticket, clock, [want], {})
        for stop, bags, numbers in route.parts:
            asked = ReadSection(stop.shard, route.kind.spec.name, len(stop.keys), bags=bags.counts)
            read.shards[stop.shard] = [ReadPart(asked, stop.keys, stop.digest, want, numbers, bags)]
        return read

    def _want(self, read: TableRead, kind: TableKind, route: KeyRoute) -> WantedRows:
        count = len(route.unique)
        lanes = kind.buffer(count, kind.stored_extra)
        want = WantedRows(kind, route.unique, np.zeros(count, dtype=bool), lanes, array_of(lanes.values), route.inverse)
        missing = None
        if read.clock != ANY_CLOCK:
            cache = self._caches.setdefault(kind.spec.name, RowCache(kind))
            floors = np.array(self.clocks)
            fresh = cache.readable(route.unique, read.clock, floors if self._spec.eager else None)
            if fresh.any():
                want.lanes.put(torch.from_numpy(fresh), cache.read(route.unique[fresh]))
                want.present |= fresh
                missing = ~fresh
        for stop in route.stops:
            at, keys, digest = stop.at, stop.keys, stop.digest
            if missing is not None and not (left := missing[at]).all():
                at, keys, digest = at[left], keys[left], b""
            if len(keys):
                asked = ReadSection(stop.shard, kind.spec.name, len(keys))
                read.shards.setdefault(stop.shard, []).append(ReadPart(asked, keys, digest, want, at))
        return want

    def _scan(self, read: TableRead, kind: TableKind, keys: range) -> RangeScan:
        window = ascending(keys)
        scan = RangeScan(kind, window, keys.step < 0)
        for shard in range(self._spec.shards) if window else ():
            asked = ReadSection(shard, kind.spec.name, -1, window.start, window.stop, window.step)
            read.shards.setdefault(shard, []).append(ReadPart(asked, NO_KEYS, b"", scan, NO_KEYS))
        return scan

    def add_rows(self, given: AnswerSection, part: ReadPart | None, reader: PayloadReader, *, wanted: bool) -> None:
        """Decode one table's rows of an answer, overlay own pushes, and store them in the read that requested them.

        Raises:
            ProtocolError: the answer is not one to the request.
        """
        kind = self._kinds.get(given.table)
        if kind is None:
            raise ProtocolError(f"an answer with rows of table {given.table!r}, which this worker has not used")
        if part is not None and given.sums != isinstance(part.want, WantedSums):
            raise ProtocolError("an answer with sums to a read of rows, or with rows to a read of sums")
        if given.sums:
            self._add_sums(given, part, reader)
            return
        keys = reader.keys(max(0, given.count)) if given.keys else part.keys if part is not None else NO_KEYS
        if given.count < 0:  # the shard has no such table yet
            held, lanes = np.zeros(len(keys), dtype=bool), kind.rows().zeros(len(keys))
        else:
            if len(keys) != given.count and wanted:
                raise ProtocolError(f"an answer of {given.count} rows for {len(keys)} keys")
            held = reader.array(given.count, np.uint8).astype(bool)
            lanes = reader.lanes(given.count, kind.spec.width, kind.dtype, kind.stored_extra)
        if not wanted:
            return
        if kind.filters is not None and held.any():
            kind.filters.on_read(keys[held], lanes.values[torch.from_numpy(held)])
        want, own_pushes = part.want if part is not None else None, self._owns[given.shard]
        if own_pushes:
            own_pushes = [own for own in own_pushes if own.table == given.table and not self._included(own, given)]
        if isinstance(want, RangeScan):  # copies: the message's memory is reused before all shards have answered
            keys, lanes = keys.copy(), lanes.at(torch.arange(len(keys)))
            want.found.append(merge_scan(want, (given.shard, self._spec.shards), keys, held, lanes, own_pushes))
            return
        present = held
        if own_pushes:
            present, lanes = overlay(kind, keys, held, lanes, own_pushes)
        if self._spec.staleness is not None:
            cache = self._caches.setdefault(given.table, RowCache(kind))
            cache.add_rows(given.shard, keys, present, lanes, given.clock, held)
        if isinstance(want, WantedRows) and part is not None:
            at = part.at_of(keys) if given.keys else part.at
            want.array[at] = array_of(lanes.values)
            if want.lanes.extra is not None and lanes.extra is not None:
                want.lanes.extra[torch.from_numpy(at)] = lanes.extra
            want.present[at] = present

    def _add_sums(self, given: AnswerSection, part: ReadPart | None, reader: PayloadReader) -> None:
        """Decode sums of bags; where the shard has no table yet they are those of the rows' start values."""
        kind = self._kinds[given.table]
        sums = None if given.count < 0 else reader.lanes(given.count, kind.spec.width, kind.dtype, 0).values
        if part is None or part.bags is None or not isinstance(part.want, WantedSums):
            return
        if sums is None:
            absent = np.zeros(len(part.keys), dtype=bool)
            sums = part.bags.sums(kind.as_read(kind.rows().zeros(len(part.keys)), absent, part.keys).values)
        if len(sums) != len(part.at):
            raise ProtocolError(f"an answer of {len(sums)} sums for {len(part.at)} bags")
        part.want.parts[given.shard] = part.at, sums.clone()

    def _included(self, own: OwnPush, given: AnswerSection) -> bool:
        if own.sequence is None:
            return False
        return own.clock < given.clock if self._spec.staleness == 0 else own.sequence <= given.sequence
