"""Sessions of workers with a store: key lists and tables that they have sent, rows that they have read."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import torch

from psctl.errors import MessageRefused
from psctl.permits import WireMessage
from psctl.ps.messages import Refused
from psctl.ps.table_messages import Fetch, ReadSection, StoreSpec, Update, UpdateSection
from psctl.ps.tables.reductions import Array, Lanes, dtype_named
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.row_index import NO_KEYS, Keys
from psctl.ps.tables.table_kinds import Functions, TableKind
from psctl.ps.tables.table_packing import PayloadReader, digest_of
from psctl.ps.tables.table_state import EntryPart

REMEMBERED = 32 << 20
"""Most bytes of key lists that are cached for each worker."""


LARGEST_BAGS = 1 << 30
"""Most bytes of the gradients of rows that a push of bags is divided among."""

TABLES = 1 << 18
"""Most tables, one for each named key, of a store."""

STORES = 1000
"""Most stores of a job."""


class UnknownToSession(Exception):
    """A message names a key list or a table that this session has not sent."""


class KeyLists:
    """Key lists of one worker by their hash; the least recently used are dropped first."""

    def __init__(self) -> None:
        self._lists: OrderedDict[bytes, Keys] = OrderedDict()
        self._bytes = 0

    def keys(self, reader: PayloadReader, count: int, digest: bytes) -> Keys:
        """Return the keys of a section: from the payload, or those of this hash.

        Raises:
            UnknownToSession: they are not known.
        """
        if not digest:
            keys = reader.keys(count)
            if known := digest_of(keys):
                keys = self._remember(known, keys)
            return keys
        if digest not in self._lists:
            raise UnknownToSession
        self._lists.move_to_end(digest)
        return self._lists[digest]

    def _remember(self, digest: bytes, keys: Keys) -> Keys:
        held = self._lists.get(digest)
        if held is None:
            held = self._lists[digest] = keys.copy()
            held.flags.writeable = False
            self._bytes += held.nbytes
        while self._bytes > REMEMBERED:
            self._bytes -= self._lists.popitem(last=False)[1].nbytes
        return held


class ClientSession:
    """One worker's session with a store.

    Args:
        number: of the session.
        step: the newest that the worker had marked when it began.
        after: the last sequence that it had used then.
    """

    def __init__(self, number: int, step: int, after: int) -> None:
        self.number, self.step, self.after = number, step, after
        self.ignored_until = -1
        """The newest session whose messages are dropped."""
        self.lists = KeyLists()
        self.kinds: dict[str, TableKind] = {}
        """Tables by name, as this worker has described them."""
        self.rows_read: dict[tuple[int, str], Array] = {}
        """By (shard, table): which slots it has read (eager)."""
        self.changes_sent: dict[tuple[int, str], int] = {}
        """By (shard, table): the number of the last change that was sent (eager)."""

    def read_part(self, section: UpdateSection, reader: PayloadReader, functions: Functions) -> EntryPart:
        """Decode an update's change of one table in one shard.

        Raises:
            UnknownToSession: it names a key list or table that this session has not sent.
            MessageRefused: it contradicts itself, or exceeds a limit.
            UsageError: the table's description is invalid.
        """
        if section.what in ("push", "start") and section.count < 0:
            raise MessageRefused(f"a {section.what} of all rows of {section.table!r}")
        if section.what == "configure" and section.count >= 0:
            raise MessageRefused(f"settings for some rows of {section.table!r}")
        if section.spec is not None:
            if section.spec.name != section.table:
                raise MessageRefused(f"the spec of {section.spec.name!r} for table {section.table!r}")
            if len(self.kinds) >= TABLES:
                raise MessageRefused(f"more than {TABLES} tables in one store")
            self.kinds[section.table] = TableKind(section.spec, functions)
        kind = self.kinds.get(section.table)
        if kind is None:
            raise UnknownToSession
        keys = lanes = numbers = None
        if section.count >= 0:
            keys = self.lists.keys(reader, section.count, section.digest)
            if len(keys) != section.count:
                raise MessageRefused(f"a list of {len(keys)} keys for {section.count} rows of {section.table!r}")
            if section.numbered:
                numbers = reader.keys(section.count)
            if section.what in ("push", "start"):
                extra = kind.stored_extra if section.what == "start" else kind.extra
                lanes = _rows(section, reader, kind, keys, extra)
        what, spec, arguments = section.what, kind.spec, section.arguments
        return EntryPart(what, section.table, spec, keys, lanes, section.function, arguments, numbers)

    def read_request(
        self, message: Fetch, reader: PayloadReader
    ) -> tuple[list[tuple[ReadSection, Keys]], dict[tuple[int, str], RowBags]]:
        """Decode a read: its sections with their keys, and the bags of those that want sums.

        Raises:
            UnknownToSession: it names a key list that this session has not sent.
            MessageRefused: its bags do not fit its keys, or a table with bags is there twice.
        """
        sections: list[tuple[ReadSection, Keys]] = []
        bags: dict[tuple[int, str], RowBags] = {}
        for asked in message.sections:
            keys = NO_KEYS if asked.count < 0 else self.lists.keys(reader, asked.count, asked.digest)
            sections.append((asked, keys))
            if asked.bags is not None and asked.count < 0:
                raise MessageRefused(f"bags of a range of keys of {asked.table!r}")
            if asked.bags is not None:
                bags[asked.shard, asked.table] = RowBags.read(reader, asked.bags, len(keys))
        if len({(asked.shard, asked.table) for asked, _ in sections}) < len(sections) and bags:
            raise MessageRefused("a read of bags that has a table of a shard twice")
        return sections, bags

    def forget(self, shard: int) -> None:
        """Forget the rows read of a shard that another server leads."""
        for each in [each for each in self.rows_read if each[0] == shard]:
            del self.rows_read[each], self.changes_sent[each]


def _rows(section: UpdateSection, reader: PayloadReader, kind: TableKind, keys: Keys, extra: int) -> Lanes:
    """Return the rows of a push or start, decoded if they are encoded or those of bags."""
    if section.bags is not None:
        if section.what != "push" or section.coded is not None or extra or kind.optimizer is None:
            raise MessageRefused(f"gradients of bags for {section.table!r}, which has no optimizer of rows")
        if len(keys) * kind.row_bytes > LARGEST_BAGS:
            raise MessageRefused(f"bags of {len(keys)} rows of {section.table!r}, more than {LARGEST_BAGS} bytes")
        bags = RowBags.read(reader, section.bags, len(keys))
        return Lanes(bags.gradients(reader.lanes(len(bags.lengths), kind.spec.width, kind.dtype, 0).values, len(keys)))
    if section.coded is None:
        return reader.lanes(section.count, kind.spec.width, kind.dtype, extra)
    if section.what != "push" or kind.filters is None or not kind.filters.encodes or extra:
        raise MessageRefused(f"encoded rows of {section.table!r}, which has no filter that encodes")
    dtype, width = section.coded
    coded = reader.lanes(section.count, width, dtype_named(dtype), 0).values
    return Lanes(kind.filters.decode(torch.from_numpy(keys.copy()), coded))


class WaitingRead(msgspec.Struct, frozen=True):
    """A read that waits for a clock. `seen`: its rows were sent, as of this number of the last change, by shard and
    table. `bags`: of which sums are wanted."""

    worker: int
    message: Fetch
    wanted: list[tuple[ReadSection, Keys]]
    seen: dict[tuple[int, str], int] | None = None
    bags: dict[tuple[int, str], RowBags] = {}


class OpenedStore:
    """One store on this server."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.sessions: dict[int, ClientSession] = {}
        self.waiting_reads: list[WaitingRead] = []
        self.refused: Refused | None = None

    def lasting_payload(self, message: WireMessage, payload: memoryview) -> memoryview:
        """Return a payload that does not change for as long as this store may keep it.

        Shared memory is unchanged until Done is sent; under bsp Done is sent before the clock ends and it is reduced.
        """
        if self.spec.staleness == 0 and isinstance(message, Update) and message.at is not None:
            return memoryview(bytearray(payload))
        return payload


def open_store(spec: StoreSpec, stores: dict[str, OpenedStore], shards: int) -> OpenedStore:
    """Return the store of this name, after making it if it does not exist.

    Raises:
        MessageRefused: its number of shards differs from the other stores', or there are STORES stores already.
    """
    if spec.shards != shards:
        raise MessageRefused(f"store {spec.name!r} of {spec.shards} shards, where all have {shards}")
    if spec.name not in stores and len(stores) >= STORES:
        raise MessageRefused(f"more than {STORES} stores")
    return stores.setdefault(spec.name, OpenedStore(spec))
