"""Encoding of table entries, which are sent down a chain, and of shards, which are copied to a new replica."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from psctl.ps.table_messages import PlainValue, StoreSpec, TableSpec
from psctl.ps.tables.retention import Sketch
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import PayloadReader, bytes_of, lanes_arrays, pack
from psctl.ps.tables.table_state import EntryPart, ShardTable, TableEntry, TableShard, What

KindOf = Callable[[str, TableSpec | None], TableKind]
"""Returns the kind of a table by its name, or by the spec that an entry carries."""


class _PartBytes(msgspec.Struct, frozen=True):
    what: str
    table: str
    spec: TableSpec | None
    count: int
    payload: bytes
    function: str
    arguments: dict[str, PlainValue]
    numbered: bool = False


class _Entry(msgspec.Struct, frozen=True):
    worker: int
    sequence: int
    clock: int
    parts: list[_PartBytes]
    what: What


class _TableBytes(msgspec.Struct, frozen=True):
    spec: TableSpec
    count: int
    rows: bytes
    settings: dict[str, float]
    now: int
    changes: int
    counts: dict[str, int]
    sketch: bytes
    counted: int


class _State(msgspec.Struct, frozen=True):
    spec: StoreSpec
    tables: list[_TableBytes]
    sequences: dict[int, int]
    clocks: dict[int, int]
    marks: dict[int, int]
    staged: list[bytes]
    restored: bool


_ENCODER = msgspec.msgpack.Encoder()
_STATES = msgspec.msgpack.Decoder(list[_State])
_ENTRY = msgspec.msgpack.Decoder(_Entry)


def encode_entry(entry: TableEntry) -> bytes:
    """Return an entry as the bytes that are sent down a chain."""
    parts = []
    for part in entry.parts:
        arrays = [] if part.keys is None else [part.keys]
        arrays += [] if part.numbers is None else [part.numbers]
        arrays += [] if part.lanes is None else lanes_arrays(part.lanes)
        count, numbered = -1 if part.keys is None else len(part.keys), part.numbers is not None
        data = bytes(pack(arrays))
        parts.append(_PartBytes(part.what, part.table, part.spec, count, data, part.function, part.arguments, numbered))
    return _ENCODER.encode(_Entry(entry.worker, entry.sequence, entry.clock, parts, entry.what))


def decode_entry(data: bytes | memoryview, kind_of: KindOf) -> TableEntry:
    """Return the entry that `encode_entry` encoded.

    Args:
        kind_of: returns the kind of a table that this entry does not describe.
    """
    found = _ENTRY.decode(data)
    parts = [_part(part, kind_of) for part in found.parts]
    return TableEntry(found.worker, found.sequence, found.clock, parts, found.what)


def _part(part: _PartBytes, kind_of: KindOf) -> EntryPart:
    reader = PayloadReader(memoryview(part.payload))
    keys = None if part.count < 0 else reader.keys(part.count)
    numbers = reader.keys(part.count) if part.numbered else None
    lanes = None
    if keys is not None and part.what in ("push", "start"):
        kind = kind_of(part.table, part.spec)
        extra = kind.stored_extra if part.what == "start" else kind.extra
        lanes = reader.lanes(len(keys), kind.spec.width, kind.dtype, extra)
    return EntryPart(part.what, part.table, part.spec, keys, lanes, part.function, part.arguments, numbers)


def staged_entries(shard: TableShard) -> list[bytes]:
    """Return the encoded updates that a shard keeps until their clock is complete."""
    return [encode_entry(entry) for workers in shard.staged.values() for each in workers.values() for entry in each]


def stage(shard: TableShard, staged: list[bytes]) -> None:
    """Add to a shard, which has the tables, the updates that `staged_entries` returned."""
    for each in staged:
        shard.stage(decode_entry(each, shard.kind))


def encode_shards(shards: list[TableShard]) -> bytes:
    """Return the whole state of these shards as bytes."""
    return _ENCODER.encode([_state(shard) for shard in shards])


def _state(shard: TableShard) -> _State:
    tables = [_table(table) for table in shard.tables.values()]
    staged = staged_entries(shard)
    return _State(shard.spec, tables, shard.sequences, shard.clocks, shard.marks, staged, shard.restored)


def _table(table: ShardTable) -> _TableBytes:
    rows, count = table.rows, len(table.rows)
    state = [] if rows.state is None else [bytes_of(rows.state[:count])]
    data = bytes(pack([rows.keys, *lanes_arrays(rows.lanes.at(slice(0, count))), *state, table.uses[:count]]))
    sketch = table.sketch.cells.tobytes(), table.sketch.counted
    return _TableBytes(table.kind.spec, count, data, table.settings, table.now, table.changes, table.counts, *sketch)


def decode_shards(data: bytes | memoryview, make: Callable[[StoreSpec], TableShard]) -> list[TableShard]:
    """Return the shards that `encode_shards` encoded.

    Args:
        make: makes an empty shard.
    """
    return [_shard(state, make(state.spec)) for state in _STATES.decode(data)]


def _shard(state: _State, shard: TableShard) -> TableShard:
    for held in state.tables:
        _fill(shard.table(held.spec), held)
    shard.sequences, shard.clocks, shard.marks = state.sequences, state.clocks, state.marks
    shard.restored = state.restored
    stage(shard, state.staged)
    return shard


def _fill(table: ShardTable, held: _TableBytes) -> None:
    kind, count, reader = table.kind, held.count, PayloadReader(memoryview(held.rows))
    keys = reader.keys(count).copy()
    lanes = reader.lanes(count, kind.spec.width, kind.dtype, kind.stored_extra)
    state = None
    if kind.optimizer is not None:
        state = reader.lanes(count, kind.optimizer.state_width, kind.optimizer.state_dtype, 0).values
    uses = reader.keys(count) if kind.removes else None
    table.settings, table.now = held.settings, held.now
    table.set_absent(keys, lanes, state, uses)
    table.changes, table.counts = held.changes, held.counts
    if held.sketch:
        cells = np.frombuffer(bytearray(held.sketch), dtype=np.uint8)
        table.sketch = Sketch(cells.reshape(table.sketch.cells.shape), held.counted)
