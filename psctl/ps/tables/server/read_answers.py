"""Answers to reads of tables, and the queue of answers that wait until all replicas have what they depend on.

A read that wants clock r is answered once all of the group have finished r clocks in the shards that it reads. Eager
stores also send rows that a worker has read when they change.

No process may observe an update that could still be lost. So each message names the versions of shards that it depends
on, and is sent when all replicas have them; messages to one worker are sent in the order in which they were queued, or
the answer of an older read could arrive after the Done of a newer push. When another server becomes a shard's primary,
queued messages about the shard are withdrawn; the workers ask the new primary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from psctl.errors import MessageRefused
from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import (
    AnswerSection,
    ClocksFinished,
    Done,
    Fetched,
    ReadSection,
    StoreLeads,
    TableDescribed,
)
from psctl.ps.tables.reductions import words_of
from psctl.ps.tables.row_index import NO_KEYS, Keys, among
from psctl.ps.tables.server.client_sessions import ClientSession, OpenedStore, WaitingRead
from psctl.ps.tables.server.table_shard import HostedShard
from psctl.ps.tables.table_packing import Allocate, PayloadWriter, allocate_private, lanes_size, padded
from psctl.ps.tables.table_state import ShardTable

READERS = -1
"""The rank that represents readers outside the job (snapshot_reads.py)."""


class HeldAnswer(msgspec.Struct):
    """One queued message. `again`: answers the same request again, for the given shards."""

    send: ToWorker
    rests_on: dict[int, int]  # shard -> version
    again: Callable[[set[int]], Any] | None = None


class HeldAnswers:
    """Queues messages by worker until the versions that they depend on are on all replicas.

    Args:
        acknowledged: returns the version of a shard that is on all of its chain.
    """

    def __init__(self, acknowledged: Callable[[int], int]) -> None:
        self._acknowledged = acknowledged
        self._queues: dict[int, deque[HeldAnswer]] = {}

    def add(self, send: ToWorker, rests_on: Mapping[int, int], again: Callable[[set[int]], Any] | None = None) -> None:
        """Queue a message until the versions in `rests_on` are acknowledged."""
        self._queues.setdefault(send.rank, deque()).append(HeldAnswer(send, dict(rests_on), again))

    def count_waiting(self, worker: int) -> int:
        """Return the number of queued messages for a worker."""
        return len(self._queues.get(worker, ()))

    def release(self) -> list[ToWorker]:
        """Return the messages that may be sent now."""
        found = []
        for worker, queue in list(self._queues.items()):
            while queue and all(self._acknowledged(shard) >= at for shard, at in queue[0].rests_on.items()):
                found.append(queue.popleft().send)
            if not queue:
                del self._queues[worker]
        return found

    def forget(self, worker: int, store: str | None = None) -> None:
        """Drop the messages for a worker whose connection, or whose session with a store, has ended."""
        kept = [
            held
            for held in self._queues.pop(worker, ())
            if store not in (None, getattr(held.send.message, "store", None))
        ]
        if kept:
            self._queues[worker] = deque(kept)

    def take_back(self, shard: int) -> None:
        """Withdraw messages about a shard that another server leads; answer reads of other shards again."""
        anew = []
        for worker, queue in list(self._queues.items()):
            kept: deque[HeldAnswer] = deque()
            for held in queue:
                left = held.rests_on.pop(shard, None) is None
                if not left and held.again is not None:
                    anew.append((held.again, set(held.rests_on)))
                elif left or _without(held, shard):
                    kept.append(held)
            self._queues[worker] = kept
        for again, shards in anew:
            again(shards)


def _without(held: HeldAnswer, shard: int) -> bool:
    """Remove a shard from a message; return False when no shard is left."""
    message = held.send.message
    if isinstance(message, Fetched):
        return False  # rows sent without a request
    if isinstance(message, StoreLeads):
        left: list[Any] = [each for each in message.shards if each.shard != shard]
    else:
        assert isinstance(message, Done | TableDescribed | ClocksFinished), "these are about shards"
        left = [each for each in message.shards if each != shard]
    held.send = ToWorker(held.send.rank, replace(message, shards=left), held.send.payload)
    return bool(left)


WAITING = 4096
"""Most reads of one worker that may wait for a clock in one store."""

ANSWER = 1 << 30
"""Most bytes of rows that one read may request from one server."""


def check_read(
    opened: OpenedStore, worker: int, wanted: Sequence[tuple[ReadSection, Keys]], slots: Mapping[int, HostedShard]
) -> None:  # fmt: skip
    """Refuse a read whose answer would be too large, or that exceeds the number of waiting reads.

    Raises:
        MessageRefused: the limit that is exceeded.
    """
    if len(opened.waiting_reads) >= WAITING and sum(each.worker == worker for each in opened.waiting_reads) >= WAITING:
        raise MessageRefused(f"more than {WAITING} reads that wait")
    size = 0
    for asked, keys in wanted:
        store = slots[asked.shard].state.stores.get(opened.spec.name)
        table = store.tables.get(asked.table) if store is not None else None
        size += len(keys) * (table.kind.row if table is not None else 1)
    if size > ANSWER:
        raise MessageRefused(f"a read of {size} bytes, more than {ANSWER}")


def answer(
    opened: OpenedStore,
    worker: int,
    ticket: int,
    wanted: Sequence[tuple[ReadSection, Keys]],
    slots: Mapping[int, HostedShard],
    allocate: Allocate,
) -> ToWorker:
    """Return the answer of a read, with the rows as they are now."""
    name, session = opened.spec.name, opened.sessions[worker]
    given: list[AnswerSection] = []
    found: list[FoundRows] = []
    for asked, keys in wanted:
        slot = slots[asked.shard]
        store = slot.state.stores.get(name)
        table = store.tables.get(asked.table) if store is not None else None
        clock, last = slot.clock(name), slot.last_sequence(name, worker)
        if asked.count < 0:
            keys = in_range(table, range(asked.start, asked.stop, asked.step))
        if table is None:
            given.append(AnswerSection(asked.shard, asked.table, -1, clock, last))
            continue
        rows = table.rows.find(keys)
        given.append(AnswerSection(asked.shard, asked.table, len(keys), clock, last, asked.count < 0))
        found.append(FoundRows(table, keys, rows, with_keys=asked.count < 0))
        if opened.spec.eager:
            _note(session, asked, table, rows[rows >= 0])
    payload = laid(found, allocate)
    return ToWorker(worker, Fetched(name, ticket, given, len(payload)), payload)


class FoundRows(NamedTuple):
    """An answer's rows of one table in one shard: keys, slots (-1: absent); `with_keys`: the payload has the keys."""

    table: ShardTable
    keys: Keys
    slots: Keys
    with_keys: bool


def laid(found: Sequence[FoundRows], allocate: Allocate = allocate_private) -> memoryview:
    """Return a payload with these rows, each copied once."""
    size = 0
    for table, keys, slots, with_keys in found:
        size += 8 * len(keys) * with_keys + padded(len(slots))
        size += lanes_size(table.rows.lanes, len(slots))
    writer = PayloadWriter(size, allocate)
    for table, keys, slots, with_keys in found:
        if with_keys:
            writer.array(keys)
        writer.array((slots >= 0).view(np.uint8))
        rows = table.rows
        if len(rows):
            writer.rows(rows.words, rows.lanes.extra, slots)
        else:
            none = rows.empty(1)
            writer.rows(words_of(none.values), none.extra, slots)
    return writer.whole.data


def _note(session: ClientSession, asked: ReadSection, table: ShardTable, slots: Keys) -> None:
    """Note which rows a worker has read, to send them again when they change."""
    where = (asked.shard, asked.table)
    read = session.rows_read.get(where)
    if read is None:
        session.changes_sent[where] = table.changes
    if read is None or len(read) < len(table.rows):
        grown = np.zeros(2 * len(table.rows), dtype=bool)
        if read is not None:
            grown[: len(read)] = read
        read = session.rows_read[where] = grown
    read[slots] = True


def news(opened: OpenedStore, worker: int, slot: HostedShard) -> Iterator[ToWorker]:
    """Yield the rows of a shard that a worker has read and that have changed since they were sent."""
    name, session = opened.spec.name, opened.sessions[worker]
    store = slot.state.stores[name]
    given: list[AnswerSection] = []
    found: list[FoundRows] = []
    for (shard, table_name), read in session.rows_read.items():
        if shard != slot.shard:
            continue
        table = store.tables[table_name]
        known = min(len(read), len(table.rows))
        slots = np.flatnonzero(read[:known] & (table.stamps[:known] > session.changes_sent[shard, table_name]))
        session.changes_sent[shard, table_name] = table.changes
        if len(slots):
            keys = table.rows.keys[slots]
            given.append(
                AnswerSection(
                    shard, table_name, len(keys), slot.clock(name), slot.last_sequence(name, worker), keys=True
                )
            )
            found.append(FoundRows(table, keys, slots, with_keys=True))
    if given:
        payload = laid(found)
        yield ToWorker(worker, Fetched(name, -1, given, len(payload)), payload)


def in_range(table: ShardTable | None, window: range) -> Keys:
    """Return the keys in a range that have rows, ascending."""
    if table is None:
        return NO_KEYS
    keys = table.rows.keys
    return np.sort(keys[among(keys, window)])


class ReadAnswers:
    """Answers reads when their clock is finished, and announces finished clocks.

    Args:
        outbox: queues the answers.
        slots: the server's shards.
        allocate: returns memory for answers.
    """

    def __init__(self, outbox: HeldAnswers, slots: Mapping[int, HostedShard], allocate: Allocate) -> None:
        self._outbox, self._slots, self._allocate = outbox, slots, allocate
        self._clocks: dict[tuple[str, int], int] = {}  # (store, shard) -> clock that was announced

    def forget(self, shard: int) -> None:
        """Forget a shard that another server leads."""
        self._clocks = {key: clock for key, clock in self._clocks.items() if key[1] != shard}

    def announce_clocks(self, opened: OpenedStore) -> None:
        """Announce finished clocks to workers, changed rows first, and answer the reads that waited for them."""
        name = opened.spec.name
        moved: dict[int, list[HostedShard]] = {}
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
                        self._outbox.add(send, {slot.shard: slot.version})
                self._outbox.add(ToWorker(worker, ClocksFinished(name, clock, sorted(versions))), versions)
        if moved:
            waiting, opened.waiting_reads = opened.waiting_reads, []
            for each in waiting:
                self.answer_read(opened, each)

    def on_read(self, opened: OpenedStore, waiting: WaitingRead) -> None:
        """Answer a new read.

        Raises:
            MessageRefused: the read exceeds a limit.
        """
        check_read(opened, waiting.worker, waiting.wanted, self._slots)
        self.answer_read(opened, waiting)

    def answer_read(self, opened: OpenedStore, waiting: WaitingRead) -> None:
        """Answer the part of a read that is led here, now or when its clock is finished."""
        name, wanted = opened.spec.name, [each for each in waiting.wanted if self._led(each[0].shard)]
        if not wanted:
            return
        clock = waiting.message.clock
        if clock > 0 and min(self._slots[asked.shard].clock(name) for asked, _ in wanted) < clock:
            opened.waiting_reads.append(waiting)
            return
        send = answer(opened, waiting.worker, waiting.message.ticket, wanted, self._slots, self._allocate)
        versions = {asked.shard: self._slots[asked.shard].version for asked, _ in wanted}
        self._outbox.add(send, versions, partial(self._answer_again, opened, waiting, wanted))

    def _answer_again(
        self, opened: OpenedStore, waiting: WaitingRead, wanted: Sequence[tuple[ReadSection, Keys]], shards: set[int]
    ) -> None:
        left = [each for each in wanted if each[0].shard in shards]
        self.answer_read(opened, WaitingRead(waiting.worker, waiting.message, left))

    def _led(self, shard: int) -> bool:
        return shard in self._slots and self._slots[shard].leads
