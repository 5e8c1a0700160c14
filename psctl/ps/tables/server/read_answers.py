"""Answers to reads of tables, and the queue of answers that wait until all replicas have what they depend on.

A read at clock r is answered once all of the group have finished r clocks in the shards that it reads. Eager
stores also send rows that a worker has read when they change.

No process may observe an update that could still be lost. So each message names the versions of shards that it depends
on, and is sent when all replicas have them; messages to one worker are sent in the order in which they were queued, or
the answer of an older read could arrive after the Done of a newer push. When another server becomes a shard's primary,
queued messages about the shard are withdrawn; the workers repeat the reads at the new primary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.errors import MessageRefused
from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import (
    AnswerSection,
    ClocksFinished,
    Done,
    Fetched,
    ReadSection,
    ShardProgress,
    StoreLeads,
    TableDescribed,
)
from psctl.ps.tables.reductions import array_of
from psctl.ps.tables.row_index import NO_KEYS, Keys, among
from psctl.ps.tables.server.client_sessions import ClientSession, OpenedStore, WaitingRead
from psctl.ps.tables.server.table_shard import HostedShard, led_shards
from psctl.ps.tables.table_packing import Allocate, PayloadWriter, allocate_private, bytes_of, lanes_size, padded
from psctl.ps.tables.table_state import ShardTable

READERS = -1
"""The rank that represents readers outside the job (server/snapshot_reads.py)."""


class HeldAnswer(msgspec.Struct):
    """One queued message. `again`: answers the same request again, for the given shards."""

    send: ToWorker
    depends_on: dict[int, int]  # shard -> version
    again: Callable[[set[int]], None] | None = None


class HeldAnswers:
    """Queues messages by worker until the versions that they depend on are on all replicas.

    Args:
        acknowledged: returns the version of a shard that is on all of its chain.
    """

    def __init__(self, acknowledged: Callable[[int], int]) -> None:
        self._acknowledged = acknowledged
        self._queues: dict[int, deque[HeldAnswer]] = {}

    def add(
        self, send: ToWorker, depends_on: Mapping[int, int], again: Callable[[set[int]], None] | None = None
    ) -> None:
        """Queue a message until the versions in `depends_on`, by shard, are acknowledged."""
        self._queues.setdefault(send.rank, deque()).append(HeldAnswer(send, dict(depends_on), again))

    def queued(self, worker: int) -> list[ToWorker]:
        """Return the queued messages for a worker."""
        return [held.send for held in self._queues.get(worker, ())]

    def release(self) -> list[ToWorker]:
        """Return the messages that may be sent now."""
        found = []
        for worker, queue in list(self._queues.items()):
            while queue and all(self._acknowledged(shard) >= at for shard, at in queue[0].depends_on.items()):
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

    def withdraw(self, shard: int) -> None:
        """Withdraw messages about a shard that another server leads; answer reads of other shards again."""
        repeated = []
        for worker, queue in list(self._queues.items()):
            kept: deque[HeldAnswer] = deque()
            for held in queue:
                unaffected = held.depends_on.pop(shard, None) is None
                if not unaffected and held.again is not None:
                    repeated.append((held.again, set(held.depends_on)))
                elif unaffected or _remove_shard(held, shard):
                    kept.append(held)
            self._queues[worker] = kept
        for again, shards in repeated:
            again(shards)


def _remove_shard(held: HeldAnswer, shard: int) -> bool:
    """Remove a shard from a message; return False when no shard is left."""
    message = held.send.message
    if isinstance(message, Fetched):
        return False  # rows sent without a request
    left: list[ShardProgress] | list[int]
    if isinstance(message, StoreLeads):
        left = [each for each in message.shards if each.shard != shard]
    elif isinstance(message, TableDescribed):
        kept = [at for at, each in enumerate(message.shards) if each != shard]
        left = [message.shards[at] for at in kept]
        message = replace(message, stats=[message.stats[at] for at in kept])
    else:
        assert isinstance(message, Done | ClocksFinished), "these are about shards"
        left = [each for each in message.shards if each != shard]
    held.send = ToWorker(held.send.rank, replace(message, shards=left), held.send.payload)
    return bool(left)


MOST_WAITING = 4096
"""Most reads of one worker that may wait for a clock in one store."""

LARGEST_ANSWER = 1 << 30
"""Most bytes of rows that one read may request from one server."""


def check_read(opened: OpenedStore, read: WaitingRead, shards: Mapping[int, HostedShard]) -> None:
    """Refuse a read whose answer would be too large, that exceeds the number of waiting reads, or wants wrong sums.

    Raises:
        MessageRefused: the limit that is exceeded, or the table that has no sums.
    """
    waiting = opened.waiting_reads
    if len(waiting) >= MOST_WAITING and sum(each.worker == read.worker for each in waiting) >= MOST_WAITING:
        raise MessageRefused(f"more than {MOST_WAITING} reads of store {opened.spec.name!r} that wait for a clock")
    size = 0
    for asked, keys in read.wanted:
        table = shards[asked.shard].table(opened.spec.name, asked.table)
        bags = read.bags.get((asked.shard, asked.table))
        if bags is not None and table is not None and table.kind.optimizer is None:
            raise MessageRefused(f"sums of rows of {asked.table!r}, which has no optimizer of rows")
        rows = len(keys) if bags is None else len(keys) + len(bags.lengths)
        size += rows * (table.kind.row_bytes if table is not None else 1)
    if size > LARGEST_ANSWER:
        raise MessageRefused(f"a read of {size} bytes of store {opened.spec.name!r}, more than {LARGEST_ANSWER}")


def make_answer(
    opened: OpenedStore, waiting: WaitingRead, shards: Mapping[int, HostedShard], allocate: Allocate, *, final: bool
) -> ToWorker:
    """Return the answer of a read, with the rows as they are now; of those that were sent before, the changed ones.

    Args:
        opened: the store.
        waiting: the read.
        shards: this server's.
        allocate: returns the answer's memory.
        final: whether no further answer follows.
    """
    worker, wanted, ticket = waiting.worker, waiting.wanted, waiting.message.ticket
    name, session = opened.spec.name, opened.sessions[worker]
    given: list[AnswerSection] = []
    found: list[FoundRows | torch.Tensor] = []
    for asked, keys in wanted:
        hosted = shards[asked.shard]
        table = hosted.table(name, asked.table)
        clock, last = hosted.clock(name), hosted.last_sequence(name, worker)
        if asked.count < 0:
            keys = keys_in_range(table, range(asked.start, asked.stop, asked.step))
        if table is None:
            sums = asked.bags is not None
            given.append(AnswerSection(asked.shard, asked.table, -1, clock, last, final=final, sums=sums))
            continue
        bags = waiting.bags.get((asked.shard, asked.table))
        if bags is not None:
            given.append(AnswerSection(asked.shard, asked.table, len(bags.lengths), clock, last, sums=True))
            found.append(bags.sums(table.read_values(keys)))
            continue
        if waiting.seen is not None:
            keys = table.changed_since(keys, waiting.seen.get((asked.shard, asked.table), -1))
            given.append(AnswerSection(asked.shard, asked.table, len(keys), clock, last, keys=True))
            found.append(FoundRows(table, keys, table.rows.find(keys), with_keys=True))
            continue
        rows = table.rows.find(keys)
        if asked.count >= 0:
            table.read_counts[0] += len(rows)
            table.read_counts[1] += int(np.count_nonzero(rows >= 0))
        given.append(AnswerSection(asked.shard, asked.table, len(keys), clock, last, asked.count < 0, final))
        found.append(FoundRows(table, keys, rows, with_keys=asked.count < 0))
        if opened.spec.eager:
            _note_rows_read(session, asked, table, rows[rows >= 0])
    payload = encode_rows(found, allocate)
    return ToWorker(worker, Fetched(name, ticket, given), payload)


class FoundRows(NamedTuple):
    """An answer's rows of one table in one shard: keys, slots (-1: absent); `with_keys`: the payload has the keys."""

    table: ShardTable
    keys: Keys
    slots: Keys
    with_keys: bool


def encode_rows(found: Sequence[FoundRows | torch.Tensor], allocate: Allocate = allocate_private) -> memoryview:
    """Return a payload with these rows, each copied once, and sums of rows."""
    size = 0
    for each in found:
        if isinstance(each, torch.Tensor):
            size += padded(each.nbytes)
            continue
        table, keys, slots, with_keys = each
        size += 8 * len(keys) * with_keys + padded(len(slots))
        size += lanes_size(table.rows.lanes, len(slots))
    writer = PayloadWriter(size, allocate)
    for each in found:
        if isinstance(each, torch.Tensor):
            writer.array(bytes_of(each))
            continue
        table, keys, slots, with_keys = each
        if with_keys:
            writer.array(keys)
        writer.array((slots >= 0).view(np.uint8))
        rows = table.rows
        if len(rows):
            writer.rows(rows.array, rows.lanes.extra, slots)
        else:
            zeros = rows.zeros(1)
            writer.rows(array_of(zeros.values), zeros.extra, slots)
    return writer.whole.data


def _note_rows_read(session: ClientSession, asked: ReadSection, table: ShardTable, slots: Keys) -> None:
    """Note which rows a worker has read, to send them again when they change."""
    key = (asked.shard, asked.table)
    read = session.rows_read.get(key)
    if read is None:
        session.changes_sent[key] = table.changes
    if read is None or len(read) < len(table.rows):
        grown = np.zeros(2 * len(table.rows), dtype=bool)
        if read is not None:
            grown[: len(read)] = read
        read = session.rows_read[key] = grown
    read[slots] = True


def changed_rows(opened: OpenedStore, worker: int, hosted: HostedShard) -> Iterator[ToWorker]:
    """Yield the rows of a shard that a worker has read and that have changed since they were sent."""
    name, session = opened.spec.name, opened.sessions[worker]
    store = hosted.state.stores[name]
    given: list[AnswerSection] = []
    found: list[FoundRows] = []
    for (shard, table_name), read in session.rows_read.items():
        if shard != hosted.shard:
            continue
        table = store.tables[table_name]
        known = min(len(read), len(table.rows))
        slots = np.flatnonzero(read[:known] & (table.stamps[:known] > session.changes_sent[shard, table_name]))
        session.changes_sent[shard, table_name] = table.changes
        if len(slots):
            keys = table.rows.keys[slots]
            clock, last = hosted.clock(name), hosted.last_sequence(name, worker)
            given.append(AnswerSection(shard, table_name, len(keys), clock, last, keys=True))
            found.append(FoundRows(table, keys, slots, with_keys=True))
    if given:
        payload = encode_rows(found)
        yield ToWorker(worker, Fetched(name, -1, given), payload)


def keys_in_range(table: ShardTable | None, window: range) -> Keys:
    """Return the keys in a range that have rows, ascending."""
    if table is None:
        return NO_KEYS
    keys = table.rows.keys
    return np.sort(keys[among(keys, window)])


class ReadAnswers:
    """Answers reads when their clock is finished, and announces finished clocks.

    Args:
        queue: receives the answers.
        shards: the server's.
        allocate: returns memory for answers.
    """

    def __init__(self, queue: HeldAnswers, shards: Mapping[int, HostedShard], allocate: Allocate) -> None:
        self._queue, self._shards, self._allocate = queue, shards, allocate
        self._clocks: dict[tuple[str, int], int] = {}  # (store, shard) -> clock that was announced

    def forget(self, shard: int) -> None:
        """Forget a shard that another server leads."""
        self._clocks = {key: clock for key, clock in self._clocks.items() if key[1] != shard}

    def announce_clocks(self, opened: OpenedStore) -> None:
        """Announce finished clocks to workers, changed rows first, and answer the reads that waited for them."""
        name = opened.spec.name
        advanced: dict[int, list[HostedShard]] = {}
        for hosted in led_shards(self._shards):
            clock = hosted.clock(name)
            if clock > self._clocks.get((name, hosted.shard), 0):
                self._clocks[name, hosted.shard] = clock
                advanced.setdefault(clock, []).append(hosted)
        for clock, shards in advanced.items():
            versions = {hosted.shard: hosted.version for hosted in shards}
            for worker in sorted(opened.sessions):
                for hosted in shards:
                    for send in changed_rows(opened, worker, hosted):
                        self._queue.add(send, {hosted.shard: hosted.version})
                self._queue.add(ToWorker(worker, ClocksFinished(name, clock, sorted(versions))), versions)
        if advanced:
            waiting, opened.waiting_reads = opened.waiting_reads, []
            for each in waiting:
                self.answer_read(opened, each)

    def on_read(self, opened: OpenedStore, waiting: WaitingRead) -> None:
        """Answer a new read.

        Raises:
            MessageRefused: the read exceeds a limit.
        """
        check_read(opened, waiting, self._shards)
        if waiting.message.early and not waiting.bags:
            waiting = self._answer_early(opened, waiting)
        self.answer_read(opened, waiting)

    def _answer_early(self, opened: OpenedStore, waiting: WaitingRead) -> WaitingRead:
        """Send the rows of a read of a later clock as they are now; return the read of those that change until then.

        Rows that may leave a table have no numbers of changes; they are sent once, at their clock.
        """
        name, seen = opened.spec.name, {}
        wanted = [each for each in waiting.wanted if self._is_led(each[0].shard)]
        if not wanted or min(self._shards[asked.shard].clock(name) for asked, _ in wanted) >= waiting.message.clock:
            return waiting
        for asked, _ in wanted:
            table = self._shards[asked.shard].table(name, asked.table)
            if asked.count < 0 or (table is not None and table.kind.removes):
                return waiting
            seen[asked.shard, asked.table] = -1 if table is None else table.watch()
        self._add_answer(opened, WaitingRead(waiting.worker, waiting.message, wanted), final=False)
        return WaitingRead(waiting.worker, waiting.message, wanted, seen)

    def answer_read(self, opened: OpenedStore, waiting: WaitingRead) -> None:
        """Answer the part of a read that is led here, now or when its clock is finished."""
        name, wanted = opened.spec.name, [each for each in waiting.wanted if self._is_led(each[0].shard)]
        if not wanted:
            return
        clock = waiting.message.clock
        if clock > 0 and min(self._shards[asked.shard].clock(name) for asked, _ in wanted) < clock:
            opened.waiting_reads.append(waiting)
            return

        self._add_answer(opened, replace(waiting, wanted=wanted), final=True)

    def _add_answer(self, opened: OpenedStore, read: WaitingRead, *, final: bool) -> None:
        """Queue the answer of a read of shards that are led here."""

        def answer_again(shards: set[int]) -> None:
            left = [each for each in read.wanted if each[0].shard in shards and self._is_led(each[0].shard)]
            if left:
                self._add_answer(opened, replace(read, wanted=left), final=final)

        send = make_answer(opened, read, self._shards, self._allocate, final=final)
        depends_on = {asked.shard: self._shards[asked.shard].version for asked, _ in read.wanted}
        self._queue.add(send, depends_on, answer_again)

    def _is_led(self, shard: int) -> bool:
        return shard in self._shards and self._shards[shard].leads
