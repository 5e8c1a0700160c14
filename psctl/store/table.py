"""The mind of a server's tables: messages of workers in, messages out; it never waits and knows no network.

It holds this server's shards of every store (table_state.py), the reads that wait for a clock, and for each worker
which key lists it was told in full and, with eager reads, which rows it has read. A read that wants clock r is answered
once all of the group have finished r clocks: the server's half of SSP's cache rule (Ho and others 2013: a row with
clock r may be read at clock c iff r >= c - s).

Exactly once: an update's sequence is larger than those of its worker before; one that is not was taken in already and
is acknowledged again. When a key list or a table is not known, nothing more of that session is taken in: the worker
begins a new one and sends again in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from psctl.errors import ProtocolError, UsageError
from psctl.store.rows import Keys
from psctl.store.table_messages import (
    Advance,
    Advanced,
    Asked,
    Because,
    Describe,
    Described,
    Done,
    Fetch,
    Fetched,
    Given,
    KeysUnknown,
    Open,
    Refused,
    Section,
    StoreSpec,
    Update,
    Why,
)
from psctl.store.table_packing import Array, Reader, digest_of, lanes_arrays, pack
from psctl.store.table_state import Entry, Functions, Part, Table, TableShard

REMEMBERED = 32 << 20
"""Bytes of key lists that are remembered for each worker."""


class Send(msgspec.Struct, frozen=True):
    """An instruction: send this to a worker. Payloads may be longer than a part (table_packing.in_parts)."""

    worker: int
    message: Any
    payload: memoryview | None = None


_NONE: Keys = np.empty(0, dtype=np.int64)


class _Unknown(Exception):
    """A key list or a table was named that this server does not know."""


class Lists:
    """Key lists of one worker by their hash; the longest unused are forgotten first."""

    def __init__(self) -> None:
        self._lists: OrderedDict[bytes, Keys] = OrderedDict()
        self._bytes = 0

    def keys(self, reader: Reader, count: int, digest: bytes) -> Keys:
        """Return the keys of a section: from the payload, or those of this hash.

        Raises:
            _Unknown: they are not known.
        """
        if not digest:
            keys = reader.keys(count)
            if known := digest_of(keys):
                self._remember(known, keys.copy())
            return keys
        if digest not in self._lists:
            raise _Unknown
        self._lists.move_to_end(digest)
        return self._lists[digest]

    def _remember(self, digest: bytes, keys: Keys) -> None:
        if digest not in self._lists:
            self._lists[digest] = keys
            self._bytes += keys.nbytes
        while self._bytes > REMEMBERED:
            self._bytes -= self._lists.popitem(last=False)[1].nbytes


class Member:
    """What a store knows of one worker's connection."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.broken = -1
        """The newest session that is not listened to any more."""
        self.lists = Lists()
        self.read: dict[tuple[int, str], Array] = {}
        """By (shard, table): which slots it has read (eager)."""
        self.seen: dict[tuple[int, str], int] = {}
        """By (shard, table): the number of the last change that it was told (eager)."""


class Opened:
    """This server's part of one store."""

    def __init__(self, spec: StoreSpec, owners: Sequence[int], rank: int, functions: Functions) -> None:
        self.spec = spec
        self.owners = list(owners)
        self.shards = {shard: TableShard(spec, functions) for shard, owner in enumerate(self.owners) if owner == rank}
        self.members: dict[int, Member] = {}
        self.waiting: list[tuple[int, Fetch, list[tuple[Asked, Keys]]]] = []
        self.refused: Refused | None = None

    @property
    def clock(self) -> int:
        """Clocks that all of the group have finished, in all shards here."""
        return min((shard.clock for shard in self.shards.values()), default=0)

    def told(self, worker: int) -> Advanced:
        """Return how far all are, and how far this worker is."""
        own = min((shard.clocks.get(worker, 0) for shard in self.shards.values()), default=0)
        return Advanced(self.spec.name, self.clock, own, self.last(worker))

    def last(self, worker: int) -> int:
        """Return the sequence of a worker's last update."""
        return max((shard.sequences.get(worker, -1) for shard in self.shards.values()), default=-1)


class TableMind:
    """All tables of one server.

    Args:
        rank: this server's.
        functions: reductions and users' functions.
    """

    def __init__(self, rank: int, functions: Functions) -> None:
        self.rank = rank
        self._functions = functions
        self.stores: dict[str, Opened] = {}

    def received(self, worker: int, message: Any, payload: memoryview) -> list[Send]:
        """Take in a whole message of a worker; return what is to be sent.

        Raises:
            ProtocolError: the message is against the protocol; end the connection, nothing was changed.
        """
        if isinstance(message, Open):
            return self._open(worker, message)
        opened = self.stores.get(message.store)
        member = opened.members.get(worker) if opened is not None else None
        if opened is None or member is None:
            raise ProtocolError(f"worker/{worker} speaks of store {message.store!r}, which it has not opened")
        if opened.refused is not None:
            return [Send(worker, opened.refused)]
        if isinstance(message, Why):
            late = {rank for shard in opened.shards.values() for rank in behind(shard, message.clock)}
            return [Send(worker, Because(message.store, message.clock, sorted(late)))]
        if message.session <= member.broken:
            return []
        try:
            return self._taken_in(opened, member, worker, message, Reader(payload))
        except _Unknown:
            member.broken = message.session
            return [Send(worker, KeysUnknown(message.store, message.session))]
        except ProtocolError:
            raise
        except UsageError as error:
            return self._refuse(opened, error.message, error.hint)
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; everyone is told
            text = f"a function of store {opened.spec.name!r} failed on server/{self.rank}"
            return self._refuse(opened, f"{text}: {type(error).__name__}: {error}", "the function's fault")

    def lost(self, worker: int) -> None:
        """Take in that a worker's connection is gone; what it pushed stays."""
        for opened in self.stores.values():
            opened.members.pop(worker, None)
            opened.waiting = [waiting for waiting in opened.waiting if waiting[0] != worker]

    def _open(self, worker: int, message: Open) -> list[Send]:
        opened = self.stores.get(message.store.name)
        if opened is None:
            opened = Opened(message.store, message.owners, self.rank, self._functions)
            self.stores[message.store.name] = opened
        if opened.spec != message.store or opened.owners != message.owners:
            why = f"store {message.store.name!r} is opened differently on worker/{worker}"
            return [Send(worker, Refused(message.store.name, why, "give run.store() the same on every rank"))]
        opened.members[worker] = Member(message.session)
        opened.waiting = [waiting for waiting in opened.waiting if waiting[0] != worker]
        return [Send(worker, opened.refused or opened.told(worker))]

    def _refuse(self, opened: Opened, reason: str, hint: str) -> list[Send]:
        opened.refused = Refused(opened.spec.name, reason, hint)
        return [Send(worker, opened.refused) for worker in sorted(opened.members)]

    def _taken_in(self, opened: Opened, member: Member, worker: int, message: Any, reader: Reader) -> list[Send]:
        match message:
            case Update():
                entries = self._entries(opened, member, worker, message, reader)
                for shard, entry in entries:
                    shard.apply(entry)
                return [Send(worker, Done(message.store, message.sequence))]
            case Advance():
                return self._advance(opened, worker, message)
            case Fetch():
                wanted = self._wanted(opened, member, message, reader)
                if message.clock > opened.clock:
                    opened.waiting.append((worker, message, wanted))
                    return []
                return [self._answer(opened, worker, message, wanted)]
            case Describe():
                held = (shard.tables.get(message.table) for shard in opened.shards.values())
                spec = next((table.kind.spec for table in held if table is not None), None)
                return [Send(worker, Described(message.store, message.ticket, spec))]
        raise ProtocolError(f"worker/{worker} sent a {type(message).__name__}, which is a server's message")

    # ---- updates -------------------------------------------------------------------------------------------------

    def _entries(
        self, opened: Opened, member: Member, worker: int, message: Update, reader: Reader
    ) -> list[tuple[TableShard, Entry]]:
        """Read an update, one entry a shard; nothing is applied before all of it is understood."""
        entries: dict[int, Entry] = {}
        for section in message.sections:
            shard = self._shard(opened, section.shard)
            entry = entries.setdefault(section.shard, Entry(worker, message.sequence, message.clock, []))
            entry.parts.append(self._part(shard, member, section, reader))
        return [(opened.shards[shard], entry) for shard, entry in entries.items()]

    def _part(self, shard: TableShard, member: Member, section: Section, reader: Reader) -> Part:
        if section.spec is not None:
            shard.table(section.spec)
        table = shard.tables.get(section.table)
        if table is None:
            raise _Unknown
        keys = lanes = None
        if section.count >= 0:
            keys = member.lists.keys(reader, section.count, section.digest)
            if section.what != "call":
                kind = table.kind
                beside = kind.held_beside if section.what == "start" else kind.beside
                lanes = reader.lanes(section.count, kind.spec.width, kind.dtype, beside)
        return Part(section.what, section.table, section.spec, keys, lanes, section.function, section.arguments)

    def _advance(self, opened: Opened, worker: int, message: Advance) -> list[Send]:
        before = opened.clock
        for shard in opened.shards.values():
            shard.apply(Entry(worker, message.sequence, message.clock, []))
        told = msgspec.structs.replace(opened.told(worker), clock=before)
        sends = [Send(worker, told), Send(worker, Done(message.store, message.sequence))]
        if opened.clock == before:
            return sends
        for rank, member in sorted(opened.members.items()):
            sends += self._news(opened, rank, member)
            sends.append(Send(rank, Advanced(message.store, opened.clock)))
        ready = [waiting for waiting in opened.waiting if waiting[1].clock <= opened.clock]
        opened.waiting = [waiting for waiting in opened.waiting if waiting[1].clock > opened.clock]
        return sends + [self._answer(opened, *waiting) for waiting in ready]

    # ---- reads ---------------------------------------------------------------------------------------------------

    def _wanted(self, opened: Opened, member: Member, message: Fetch, reader: Reader) -> list[tuple[Asked, Keys]]:
        found: list[tuple[Asked, Keys]] = []
        for asked in message.sections:
            self._shard(opened, asked.shard)
            keys = _NONE if asked.count < 0 else member.lists.keys(reader, asked.count, asked.digest)
            found.append((asked, keys))
        return found

    def _answer(self, opened: Opened, worker: int, message: Fetch, wanted: list[tuple[Asked, Keys]]) -> Send:
        member = opened.members[worker]
        given: list[Given] = []
        arrays: list[Array] = []
        for asked, keys in wanted:
            shard = opened.shards[asked.shard]
            table = shard.tables.get(asked.table)
            if asked.count < 0:
                keys = in_range(table, asked.start, asked.stop)
                arrays.append(keys)
            if table is None:
                given.append(Given(asked.shard, asked.table, -1))
                continue
            there, lanes, slots = table.read(keys)
            given.append(Given(asked.shard, asked.table, len(keys), asked.count < 0))
            arrays += [there.view(np.uint8), *lanes_arrays(lanes)]
            if opened.spec.eager:
                self._noted(member, asked, table, slots[there])
        payload = pack(arrays)
        fetched = Fetched(message.store, message.ticket, opened.clock, opened.last(worker), given, len(payload))
        return Send(worker, fetched, payload)

    def _noted(self, member: Member, asked: Asked, table: Table, slots: Keys) -> None:
        """Remember which rows a worker has read, to send them when they are newer."""
        where = (asked.shard, asked.table)
        read = member.read.get(where)
        if read is None:
            member.seen[where] = table.changes
        if read is None or len(read) < len(table.rows):
            grown = np.zeros(2 * len(table.rows), dtype=bool)
            if read is not None:
                grown[: len(read)] = read
            read = member.read[where] = grown
        read[slots] = True

    def _news(self, opened: Opened, worker: int, member: Member) -> Iterator[Send]:
        """Yield the rows that a worker has read and that have changed since it was told."""
        given: list[Given] = []
        arrays: list[Array] = []
        for (index, name), read in member.read.items():
            table = opened.shards[index].tables[name]
            known = min(len(read), len(table.rows))
            slots = np.flatnonzero(read[:known] & (table.stamps[:known] > member.seen[index, name]))
            member.seen[index, name] = table.changes
            if len(slots):
                keys = table.rows.keys[slots]
                there, lanes, _ = table.read(keys)
                given.append(Given(index, name, len(keys), True))
                arrays += [keys, there.view(np.uint8), *lanes_arrays(lanes)]
        if given:
            payload = pack(arrays)
            fetched = Fetched(opened.spec.name, -1, opened.clock, opened.last(worker), given, len(payload))
            yield Send(worker, fetched, payload)

    def _shard(self, opened: Opened, index: int) -> TableShard:
        found = opened.shards.get(index)
        if found is None:
            raise ProtocolError(f"shard {index} of store {opened.spec.name!r} is not on server/{self.rank}")
        return found


def behind(shard: TableShard, clock: int) -> list[int]:
    """Return the workers that have not finished so many clocks."""
    return [worker for worker, finished in shard.clocks.items() if finished < clock]


def in_range(table: Table | None, start: int, stop: int) -> Keys:
    """Return the keys in [start, stop) that there are rows of, ascending."""
    if table is None:
        return _NONE
    keys = table.rows.keys
    return np.sort(keys[(keys >= start) & (keys < stop)])
