"""How a server of tables answers reads: from the shards that it leads, and by itself when rows that were read change.

A read that wants clock r is answered once all of the group have finished r clocks in the shards that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from psctl.errors import MessageRefused
from psctl.ps.table_messages import Advanced, Asked, Fetched, Given
from psctl.ps.tables.reductions import words_of
from psctl.ps.tables.row_index import NO_KEYS, Keys, among
from psctl.ps.tables.server.client_sessions import Opened, Session, Waiting
from psctl.ps.tables.server.held_answers import Outbox, Send
from psctl.ps.tables.server.table_shard import Slot
from psctl.ps.tables.table_packing import Room, Writer, lanes_size, padded, private
from psctl.ps.tables.table_state import Table

WAITING = 4096
"""Reads of one worker that may wait for a clock in one store."""

ANSWER = 1 << 30
"""Bytes of rows that one read may ask of one server."""


def check_read(
    opened: Opened, worker: int, wanted: Sequence[tuple[Asked, Keys]], slots: Mapping[int, Slot]
) -> None:  # fmt: skip
    """Refuse a read whose answer would take too much memory, or one more than may wait.

    Raises:
        MessageRefused: says which.
    """
    if len(opened.waiting) >= WAITING and sum(each.worker == worker for each in opened.waiting) >= WAITING:
        raise MessageRefused(f"more than {WAITING} reads that wait")
    size = 0
    for asked, keys in wanted:
        store = slots[asked.shard].machine.stores.get(opened.spec.name)
        table = store.tables.get(asked.table) if store is not None else None
        size += len(keys) * (table.kind.row if table is not None else 1)
    if size > ANSWER:
        raise MessageRefused(f"a read of {size} bytes, more than {ANSWER}")


def answer(
    opened: Opened,
    worker: int,
    ticket: int,
    wanted: Sequence[tuple[Asked, Keys]],
    slots: Mapping[int, Slot],
    room: Room,
) -> Send:
    """Return what was asked, as it is now."""
    name, session = opened.spec.name, opened.sessions[worker]
    given: list[Given] = []
    found: list[Found] = []
    for asked, keys in wanted:
        slot = slots[asked.shard]
        store = slot.machine.stores.get(name)
        table = store.tables.get(asked.table) if store is not None else None
        clock, last = slot.clock(name), slot.last(name, worker)
        if asked.count < 0:
            keys = in_range(table, range(asked.start, asked.stop, asked.step))
        if table is None:
            given.append(Given(asked.shard, asked.table, -1, clock, last))
            continue
        rows = table.rows.find(keys)
        given.append(Given(asked.shard, asked.table, len(keys), clock, last, asked.count < 0))
        found.append(Found(table, keys, rows, told=asked.count < 0))
        if opened.spec.eager:
            _note(session, asked, table, rows[rows >= 0])
    payload = laid(found, room)
    return Send(worker, Fetched(name, ticket, given, len(payload)), payload)


class Found(NamedTuple):
    """What an answer has of one table in one shard: keys, the slots of their rows (-1: none); `told`: keys too."""

    table: Table
    keys: Keys
    slots: Keys
    told: bool


def laid(found: Sequence[Found], room: Room = private) -> memoryview:
    """Return a payload of rows, each copied once."""
    size = 0
    for table, keys, slots, told in found:
        size += 8 * len(keys) * told + padded(len(slots))
        size += lanes_size(table.rows.lanes, len(slots))
    writer = Writer(size, room)
    for table, keys, slots, told in found:
        if told:
            writer.array(keys)
        writer.array((slots >= 0).view(np.uint8))
        rows = table.rows
        if len(rows):
            writer.rows(rows.words, rows.lanes.beside, slots)
        else:
            none = rows.empty(1)
            writer.rows(words_of(none.values), none.beside, slots)
    return writer.whole.data


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
    found: list[Found] = []
    for (shard, table_name), read in session.read.items():
        if shard != slot.shard:
            continue
        table = store.tables[table_name]
        known = min(len(read), len(table.rows))
        slots = np.flatnonzero(read[:known] & (table.stamps[:known] > session.seen[shard, table_name]))
        session.seen[shard, table_name] = table.changes
        if len(slots):
            keys = table.rows.keys[slots]
            given.append(Given(shard, table_name, len(keys), slot.clock(name), slot.last(name, worker), keys=True))
            found.append(Found(table, keys, slots, told=True))
    if given:
        payload = laid(found)
        yield Send(worker, Fetched(name, -1, given, len(payload)), payload)


def in_range(table: Table | None, window: range) -> Keys:
    """Return the keys of a range that there are rows of, ascending."""
    if table is None:
        return NO_KEYS
    keys = table.rows.keys
    return np.sort(keys[among(keys, window)])


class Answers:
    """Reads that wait for a clock, and what is told when clocks end.

    Args:
        outbox: where answers go.
        slots: the server's shards.
        room: where the memory of answers comes from.
    """

    def __init__(self, outbox: Outbox, slots: Mapping[int, Slot], room: Room) -> None:
        self._outbox, self._slots, self._room = outbox, slots, room
        self._clocks: dict[tuple[str, int], int] = {}  # (store, shard) -> clock that was told

    def forget(self, shard: int) -> None:
        """A shard is led by another."""
        self._clocks = {key: clock for key, clock in self._clocks.items() if key[1] != shard}

    def tell_clocks(self, opened: Opened) -> None:
        """Tell workers of clocks that have ended, rows that changed first, and answer who waited for them."""
        name = opened.spec.name
        moved: dict[int, list[Slot]] = {}
        for slot in [slot for _, slot in sorted(self._slots.items()) if slot.leads]:
            clock = slot.clock(name)
            if clock > self._clocks.get((name, slot.shard), 0):
                self._clocks[name, slot.shard] = clock
                moved.setdefault(clock, []).append(slot)
        for clock, slots in moved.items():
            versions = {slot.shard: slot.version for slot in slots}
            for worker in sorted(opened.sessions):
                for slot in slots:
                    for send in news(opened, worker, slot):
                        self._outbox.put(send, {slot.shard: slot.version})
                self._outbox.put(Send(worker, Advanced(name, clock, sorted(versions))), versions)
        if moved:
            waiting, opened.waiting = opened.waiting, []
            for each in waiting:
                self.read(opened, each)

    def asked(self, opened: Opened, waiting: Waiting) -> None:
        """Answer a read that has come in just now.

        Raises:
            MessageRefused: it is beyond a bound.
        """
        check_read(opened, waiting.worker, waiting.wanted, self._slots)
        self.read(opened, waiting)

    def read(self, opened: Opened, waiting: Waiting) -> None:
        """Answer a read of what is led here, now or when its clock is there."""
        name, wanted = opened.spec.name, [each for each in waiting.wanted if self._led(each[0].shard)]
        if not wanted:
            return
        clock = waiting.message.clock
        if clock > 0 and min(self._slots[asked.shard].clock(name) for asked, _ in wanted) < clock:
            opened.waiting.append(waiting)
            return
        send = answer(opened, waiting.worker, waiting.message.ticket, wanted, self._slots, self._room)
        versions = {asked.shard: self._slots[asked.shard].version for asked, _ in wanted}
        self._outbox.put(send, versions, partial(self._again, opened, waiting, wanted))

    def _again(self, opened: Opened, waiting: Waiting, wanted: Sequence[tuple[Asked, Keys]], shards: set[int]) -> None:
        left = [each for each in wanted if each[0].shard in shards]
        self.read(opened, Waiting(waiting.worker, waiting.message, left))

    def _led(self, shard: int) -> bool:
        return shard in self._slots and self._slots[shard].leads
