"""How a server of tables answers reads: from the shards that it leads, and by itself when rows that were read change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from psctl.store.rows import Keys
from psctl.store.table_messages import Asked, Fetched, Given
from psctl.store.table_outbox import Send
from psctl.store.table_packing import Array, lanes_arrays, pack
from psctl.store.table_sessions import Opened, Session
from psctl.store.table_slot import Slot
from psctl.store.table_state import Table

NO_KEYS: Keys = np.empty(0, dtype=np.int64)


def answer(
    opened: Opened, worker: int, ticket: int, wanted: Sequence[tuple[Asked, Keys]], slots: Mapping[int, Slot]
) -> Send:
    """Return what was asked, as it is now."""
    name, session = opened.spec.name, opened.sessions[worker]
    given: list[Given] = []
    arrays: list[Array] = []
    for asked, keys in wanted:
        slot = slots[asked.shard]
        store = slot.machine.stores.get(name)
        table = store.tables.get(asked.table) if store is not None else None
        clock, last = slot.clock(name), slot.last(name, worker)
        if asked.count < 0:
            keys = in_range(table, asked.start, asked.stop)
            arrays.append(keys)
        if table is None:
            given.append(Given(asked.shard, asked.table, -1, clock, last))
            continue
        there, lanes, rows = table.read(keys)
        given.append(Given(asked.shard, asked.table, len(keys), clock, last, asked.count < 0))
        arrays += [there.view(np.uint8), *lanes_arrays(lanes)]
        if opened.spec.eager:
            _note(session, asked, table, rows[there])
    payload = pack(arrays)
    return Send(worker, Fetched(name, ticket, given, len(payload)), payload)


def _note(session: Session, asked: Asked, table: Table, slots: Keys) -> None:
    """Remember which rows a worker has read, to send them when they are newer."""
    where = (asked.shard, asked.table)
    read = session.read.get(where)
    if read is None:
        session.seen[where] = table.changes
    if read is None or len(read) < len(table.rows):
        grown = np.zeros(2 * len(table.rows), dtype=bool)
        if read is not None:
            grown[: len(read)] = read
        read = session.read[where] = grown
    read[slots] = True


def news(opened: Opened, worker: int, slot: Slot) -> Iterator[Send]:
    """Yield the rows of a shard that a worker has read and that have changed since it was told."""
    name, session = opened.spec.name, opened.sessions[worker]
    store = slot.machine.stores[name]
    given: list[Given] = []
    arrays: list[Array] = []
    for (shard, table_name), read in session.read.items():
        if shard != slot.shard:
            continue
        table = store.tables[table_name]
        known = min(len(read), len(table.rows))
        slots = np.flatnonzero(read[:known] & (table.stamps[:known] > session.seen[shard, table_name]))
        session.seen[shard, table_name] = table.changes
        if len(slots):
            keys = table.rows.keys[slots]
            there, lanes, _ = table.read(keys)
            given.append(Given(shard, table_name, len(keys), slot.clock(name), slot.last(name, worker), keys=True))
            arrays += [keys, there.view(np.uint8), *lanes_arrays(lanes)]
    if given:
        payload = pack(arrays)
        yield Send(worker, Fetched(name, -1, given, len(payload)), payload)


def in_range(table: Table | None, start: int, stop: int) -> Keys:
    """Return the keys in [start, stop) that there are rows of, ascending."""
    if table is None:
        return NO_KEYS
    keys = table.rows.keys
    return np.sort(keys[(keys >= start) & (keys < stop)])
