"""Changes, by sequence, and reads, by ticket, that not all shards have answered, and the messages that carry them.

A ServerSession makes the messages to one server. It records the key lists and tables that the server has received in
this session, because later messages omit them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.errors import ProtocolError
from psctl.ps.outputs import ToServer
from psctl.ps.table_messages import (
    LARGEST_UPDATE,
    DescribeTable,
    Fetch,
    Marker,
    OpenStore,
    PlainValue,
    ReadSection,
    Separation,
    StoreSpec,
    TableDescribed,
    Update,
    UpdateSection,
)
from psctl.ps.tables.client.key_routes import KeyRoute, KeyRoutes, RouteStop
from psctl.ps.tables.client.row_cache import OwnPush, overlay
from psctl.ps.tables.reductions import Array, Lanes, array_of
from psctl.ps.tables.row_bags import RowBags, split_bags
from psctl.ps.tables.row_index import NO_KEYS, Keys, among, shard_of
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import Allocate, PayloadReader, PayloadWriter, lanes_size, pack, padded


class ShardChange(msgspec.Struct, frozen=True, eq=False):
    """A change's part for one shard: the section without its digest, and the arrays of its payload: keys, rows."""

    section: UpdateSection
    keys: Keys | None
    digest: bytes
    rows: Array | None = None


class PushedRows(NamedTuple):
    """A push's rows of one table, one for each of the route's unique keys; `coded`: the form in which they are sent."""

    kind: TableKind
    route: KeyRoute
    lanes: Lanes
    coded: torch.Tensor | None = None

    @property
    def sent(self) -> Lanes:
        """The rows in the form in which they are sent."""
        return self.lanes if self.coded is None else Lanes(self.coded)


class TableChange(msgspec.Struct, eq=False):
    """An update, a clock or a mark that not all shards have yet. `own_pushes`: the own pushes that reads overlay."""

    ticket: int
    clock: int
    shards: dict[int, list[ShardChange]]
    """The parts of each shard that does not have the change yet."""
    own_pushes: list[OwnPush]
    bytes: int = 0
    sequence: int = -1
    what: Literal["update"] | Separation = "update"
    singles: list[int] = []
    """Tickets of single-key pushes that are sent together; the change has the sequence of the newest."""


class WantedRows(msgspec.Struct, eq=False):
    """One table's part of a read: unique keys, and the rows found so far."""

    kind: TableKind
    keys: Keys
    present: Array
    lanes: Lanes
    array: Array
    """A view of the same values (`array_of`)."""
    inverse: Keys | None
    """The index of each key of the call among the unique keys; None: the call's keys are the unique keys."""


class WantedSums(msgspec.Struct, eq=False):
    """A read of sums of bags of rows: what each shard has of them, with the numbers of the bags."""

    kind: TableKind
    bags: int
    parts: dict[int, tuple[Keys, torch.Tensor]] = msgspec.field(default_factory=dict)

    def total(self) -> torch.Tensor:
        """Return the sums, added in the order of shards."""
        found = torch.zeros(self.bags, self.kind.spec.width, dtype=self.kind.dtype)
        for _, (numbers, sums) in sorted(self.parts.items()):
            found.index_add_(0, torch.from_numpy(numbers), sums)
        return found


class PooledPart(NamedTuple):
    """One shard's part of bags: its keys, the bags among them, and their numbers."""

    stop: RouteStop
    bags: RowBags
    numbers: Keys


class PooledRoute(NamedTuple):
    """Bags of a table's keys by shard; and the bytes that a pull and a push take with rows of keys, and of bags."""

    kind: TableKind
    keys: Keys
    whole: RowBags
    parts: list[PooledPart]
    bytes_of_rows: int
    bytes_of_bags: int

    @property
    def saves(self) -> bool:
        """Whether sums of bags are fewer bytes, in messages that need no cutting."""
        return self.bytes_of_bags < self.bytes_of_rows and self.bytes_of_bags + 8 * len(self.keys) < LARGEST_UPDATE // 2


def pooled_route(kind: TableKind, route: KeyRoute, bags: RowBags) -> PooledRoute:
    """Return the route of bags whose places are those of the route's unique keys."""
    split = split_bags(bags, [stop.at for stop in route.stops], len(route.unique))
    parts = [PooledPart(stop, *found) for stop, found in zip(route.stops, split, strict=True)]
    of_bags = sum(part.bags.bytes + len(part.numbers) * kind.row_bytes for part in parts)
    return PooledRoute(kind, route.unique, bags, parts, 2 * len(route.unique) * kind.row_bytes, 2 * of_bags)


def pooled_push(route: PooledRoute, gradients: torch.Tensor) -> dict[int, list[ShardChange]]:
    """Return the changes that push the gradients of bags, by shard."""
    shards: dict[int, list[ShardChange]] = {}
    array = array_of(gradients.contiguous())
    for part in route.parts:
        size = part.bags.bytes + padded(len(part.numbers) * route.kind.row_bytes)
        writer = PayloadWriter(size)
        writer.array(part.bags.places)
        writer.array(part.bags.lengths)
        writer.rows(array, None, part.numbers)
        stop = part.stop
        section = UpdateSection(stop.shard, route.kind.spec.name, len(stop.keys), bags=part.bags.counts)
        shards[stop.shard] = [ShardChange(section, stop.keys, stop.digest, writer.whole)]
    return shards


class RangeScan(msgspec.Struct, eq=False):
    """A read of all existing rows in an ascending range of keys; `descending`: the range of the call descends."""

    kind: TableKind
    window: range
    descending: bool
    found: list[tuple[Keys, Array, Lanes]] = msgspec.field(default_factory=list)


class ReadPart(msgspec.Struct, frozen=True, eq=False):
    """A read's request to one shard; `at`: the indices of its rows in `want`."""

    asked: ReadSection
    keys: Keys
    digest: bytes
    want: WantedRows | RangeScan | WantedSums
    at: Keys
    bags: RowBags | None = None

    def at_of(self, keys: Keys) -> Keys:
        """Return the indices in `want` of some of the requested keys.

        Raises:
            ProtocolError: one was not requested.
        """
        order = np.argsort(self.keys)
        places = np.searchsorted(self.keys, keys, sorter=order)
        if len(keys) and (places.max() >= len(order) or not np.array_equal(self.keys[order[places]], keys)):
            raise ProtocolError("an answer has rows that were not requested")
        found: Keys = self.at[order[places]]
        return found


class TableRead(msgspec.Struct, eq=False):
    """A read that not all shards have answered, with its requests by shard; `singles`: tickets of single-key reads.

    `early`: of a later clock; rows come before it, and changed ones again then.
    """

    ticket: int
    clock: int
    wants: list[WantedRows | RangeScan | WantedSums]
    shards: dict[int, list[ReadPart]]
    singles: list[int] = []
    early: bool = False


class ServerSession:
    """A session with one server of a store: makes the messages to it."""

    def __init__(self, spec: StoreSpec, server: int) -> None:
        self._spec, self.server = spec, server
        self.number, self.term = 0, -1
        self.shards: set[int] = set()
        """The shards that the server leads, as announced in this session."""
        self._lists: set[bytes] = set()
        self._described: set[tuple[int, str]] = set()

    def start(self, step: int, after: int) -> ToServer:
        """Start a new session, in which the server has no key lists or tables and has announced no shards.

        Args: as Open's.
        """
        self.number += 1
        self.term = -1
        self._lists.clear()
        self._described.clear()
        self.shards.clear()
        return ToServer(self.server, OpenStore(self._spec, self.number, step, after))

    def update(self, change: TableChange, kinds: dict[str, TableKind], shards: set[int]) -> list[ToServer]:
        """Return a change's message about these shards; none when it has nothing for them."""
        to = [shard for shard in change.shards if shard in shards]
        if not to:
            return []
        store, session, term = self._spec.name, self.number, self.term
        if change.what != "update":
            marker = Marker(store, session, term, to, change.sequence, change.what, change.clock)
            return [ToServer(self.server, marker)]
        sections: list[UpdateSection] = []
        arrays: list[Array] = []
        for part in [part for shard in to for part in change.shards[shard]]:
            table = (part.section.shard, part.section.table)
            spec = None if table in self._described else kinds[part.section.table].spec
            self._described.add(table)
            digest = self._keys(part.keys, part.digest, arrays)
            sections.append(replace(part.section, spec=spec, digest=digest))
            if part.rows is not None:
                arrays.append(part.rows)
        payload = pack(arrays)
        message = Update(store, session, term, change.sequence, change.clock, sections)
        return [ToServer(self.server, message, payload)]

    def fetch(self, read: TableRead, shards: set[int]) -> list[ToServer]:
        """Return a read's message about these shards."""
        sections: list[ReadSection] = []
        arrays: list[Array] = []
        for part in [part for shard, each in read.shards.items() if shard in shards for part in each]:
            known = b"" if part.asked.count < 0 else self._keys(part.keys, part.digest, arrays)
            sections.append(replace(part.asked, digest=known))
            if part.bags is not None:
                arrays += part.bags
        if not sections:
            return []
        payload = pack(arrays)
        name, session = self._spec.name, self.number
        message = Fetch(name, session, self.term, read.ticket, read.clock, sections, read.early)
        return [ToServer(self.server, message, payload)]

    def describe(self, ticket: int, table: str, shards: set[int]) -> list[ToServer]:
        """Return the request for a table's description, addressed to these shards."""
        if not shards:
            return []
        message = DescribeTable(self._spec.name, self.number, self.term, sorted(shards), ticket, table)
        return [ToServer(self.server, message)]

    def _keys(self, keys: Keys | None, digest: bytes, arrays: list[Array]) -> bytes:
        """Return the hash of these keys if the server has it; else add the keys to the message and return no hash."""
        if keys is None:
            return b""
        if digest and digest in self._lists:
            return digest
        if digest:
            self._lists.add(digest)
        arrays.append(keys)
        return b""


def split_push(
    parts: Sequence[PushedRows], what: Literal["push", "start"], clock: int, allocate: Allocate
) -> tuple[dict[int, list[ShardChange]], list[OwnPush]]:
    """Return the changes of a push by shard, and its rows in each shard; all of them are copies in one new buffer."""
    shards: dict[int, list[ShardChange]] = {}
    own_pushes: list[OwnPush] = []
    size = sum(lanes_size(part.sent, len(stop.keys)) for part in parts for stop in part.route.stops)
    writer = PayloadWriter(size, allocate)
    for part in parts:
        kind, route, lanes, coded = part
        name = kind.spec.name
        form = None if coded is None else (str(coded.dtype)[6:], coded.shape[1])
        decoded = None if coded is None else lanes.at(torch.from_numpy(route.order))
        at = 0
        for stop, rows, held, first in _write_rows(writer, route, part.sent):
            section = UpdateSection(stop.shard, name, len(stop.keys), what, coded=form)
            shards.setdefault(stop.shard, []).append(ShardChange(section, stop.keys, stop.digest, rows))
            if decoded is not None:
                held, first = decoded, at
            at += len(stop.keys)
            own_pushes.append(OwnPush(stop.shard, name, stop.keys, held, clock, None, first))
    return shards, own_pushes


def _write_rows(writer: PayloadWriter, route: KeyRoute, lanes: Lanes) -> Iterator[tuple[RouteStop, Array, Lanes, int]]:
    """Copy rows in the order of a route; yield each stop's rows as bytes, and as lanes with the index of the first."""
    array, extra, dtype = array_of(lanes.values), lanes.extra, lanes.values.dtype
    width, row_bytes = array.shape[1], array.shape[1] * array.itemsize
    adjacent, first = extra is None and row_bytes % 8 == 0, 0  # without padding between consecutive stops
    if adjacent:
        start = writer.at
        writer.rows(array, None, route.order)
        held = PayloadReader(writer.whole[start:].data).lanes(len(route.order), width, dtype, 0)
    for stop in route.stops:
        count = len(stop.keys)
        if adjacent:
            end = start + count * row_bytes
            yield stop, writer.whole[start:end], held, first
            start = end
        else:
            start = writer.at
            writer.rows(array, extra, route.order[first : first + count])
            part = writer.whole[start : writer.at]
            extra_width = 0 if extra is None else extra.shape[1]
            yield stop, part, PayloadReader(part.data).lanes(count, width, dtype, extra_width), 0
        first += count


def split_call(
    name: str, route: KeyRoute, function: str, arguments: dict[str, PlainValue]
) -> dict[int, list[ShardChange]]:
    """Return the changes of a call on some rows, by shard."""
    found: dict[int, list[ShardChange]] = {}
    for stop in route.stops:
        section = UpdateSection(stop.shard, name, len(stop.keys), "call", function=function, arguments=arguments)
        found[stop.shard] = [ShardChange(section, stop.keys, stop.digest)]
    return found


def change_of_all(
    name: str, what: Literal["call", "configure"], function: str, arguments: dict[str, PlainValue], shards: int
) -> dict[int, list[ShardChange]]:
    """Return the changes of a call on all rows, or of the optimizer's settings, by shard."""
    return {
        shard: [ShardChange(UpdateSection(shard, name, -1, what, function=function, arguments=arguments), None, b"")]
        for shard in range(shards)
    }


def split_large_push(parts: Sequence[PushedRows], routes: KeyRoutes) -> list[list[PushedRows]]:
    """Cut a push that is too large for one message into several."""
    size = sum(part.lanes.values.nbytes + 8 * len(part.route.unique) for part in parts)
    if 2 * size <= LARGEST_UPDATE:
        return [list(parts)]
    found = []
    for kind, route, lanes, coded in parts:
        row_bytes = 8 + lanes.values.nbytes // max(1, len(route.unique))
        rows = max(1, LARGEST_UPDATE // 2 // row_bytes)
        for start in range(0, len(route.unique), rows):
            part = routes.route_of(kind.spec.name, route.unique[start : start + rows])
            cut = slice(start, start + rows)
            found.append([PushedRows(kind, part, lanes.at(cut), None if coded is None else coded[cut])])
    return found


def result(want: WantedRows | RangeScan) -> tuple[Keys, Lanes]:
    """Return the keys and rows of a finished read, in the order of the call."""
    if isinstance(want, WantedRows):
        lanes = want.kind.as_read(want.lanes, want.present, want.keys)
        if want.inverse is None:
            return want.keys, lanes
        return want.keys[want.inverse], lanes.at(torch.from_numpy(want.inverse))
    if not want.found:  # an empty range
        return NO_KEYS, want.kind.rows().zeros(0)
    keys = np.concatenate([part[0] for part in want.found])
    lanes = concatenate([part[2] for part in want.found])
    order = np.argsort(keys)
    if want.descending:
        order = order[::-1].copy()
    keys, lanes = keys[order], lanes.at(torch.from_numpy(order))
    return keys, want.kind.as_read(lanes, np.ones(len(keys), dtype=bool), keys)


def merge_scan(
    scan: RangeScan, shard: tuple[int, int], keys: Keys, held: Array, lanes: Lanes, own_pushes: list[OwnPush]
) -> tuple[Keys, Array, Lanes]:
    """Return the rows of a range in one shard (of how many), with own ones that its server does not have yet."""
    mine = [own.keys[among(own.keys, scan.window)] for own in own_pushes]
    if mine:
        new = np.setdiff1d(np.concatenate(mine), keys)
        new = new[shard_of(scan.kind.spec.name, new, shard[1]) == shard[0]]
        keys, held = np.concatenate([keys, new]), np.concatenate([held, np.zeros(len(new), dtype=bool)])
        lanes = concatenate([lanes, scan.kind.rows().zeros(len(new))])
    present, lanes = overlay(scan.kind, keys, held, lanes, own_pushes)
    return keys, present, lanes


def concatenate(parts: Sequence[Lanes]) -> Lanes:
    """Return the concatenation of rows."""
    extra = [part.extra for part in parts if part.extra is not None]
    return Lanes(torch.cat([part.values for part in parts]), torch.cat(extra) if extra else None)


NO_TICKET = -1
"""The ticket of a change that no caller waits for."""

NO_SERVER = -1
"""The leader of a shard that no server leads."""


class UnackedChanges:
    """The changes that not all shards have acknowledged, in order of sequence."""

    def __init__(self) -> None:
        self.bytes_in_flight = 0
        """Bytes of rows that are kept until servers have them."""
        self._changes: dict[int, TableChange] = {}  # in order
        self._parts: dict[int, int] = {}  # by ticket: changes that are not done

    def __iter__(self) -> Iterator[TableChange]:
        return iter(self._changes.values())

    def __bool__(self) -> bool:
        return bool(self._changes)

    def expect(self, ticket: int, changes: int) -> None:
        """Set the number of changes that a ticket waits for."""
        self._parts[ticket] = changes

    def add(self, change: TableChange) -> None:
        """Keep a change until it is done."""
        self._changes[change.sequence] = change

    def on_done(self, sequence: int, shards: list[int]) -> list[TableChange]:
        """Note that these shards have all changes up to a sequence; return the changes that all shards have now."""
        done = []
        for change in self._changes.values():
            if change.sequence > sequence:
                break
            for shard in shards:
                change.shards.pop(shard, None)
            if not change.shards:
                done.append(change)
        for change in done:
            del self._changes[change.sequence]
            self.bytes_in_flight -= change.bytes
        return done

    def finished_tickets(self, change: TableChange) -> list[int]:
        """Return the tickets that this finished change completes."""
        if change.ticket == NO_TICKET:
            return change.singles
        self._parts[change.ticket] -= 1
        if self._parts[change.ticket]:
            return []
        del self._parts[change.ticket]
        return [change.ticket]

    def shards_waited_for(self, ticket: int) -> set[int]:
        """Return the shards that a ticket waits for."""
        changes = [change for change in self if ticket == change.ticket or ticket in change.singles]
        return {shard for change in changes for shard in change.shards}


class OpenDescriptions:
    """Requests for table descriptions (DescribeTable): by ticket, the table and the shards that have not answered."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, set[int]]] = {}

    def add(self, ticket: int, table: str, shards: set[int]) -> None:
        """Record a request to these shards."""
        self._open[ticket] = table, shards

    def resend(self, session: ServerSession, shards: set[int]) -> list[ToServer]:
        """Return the pending requests to the shards that a server leads now."""
        return [
            out
            for ticket, (table, left) in self._open.items()
            for out in session.describe(ticket, table, shards & left)
        ]

    def shards_waited_for(self, ticket: int) -> set[int]:
        """Return the shards that have not answered."""
        return self._open.get(ticket, ("", set()))[1]

    def on_answer(self, message: TableDescribed) -> bool:
        """Note that some shards have answered; return whether they were the last."""
        left = self.shards_waited_for(message.ticket)
        last = bool(left) and left <= set(message.shards)
        left.difference_update(message.shards)
        if last:
            del self._open[message.ticket]
        return last
