"""The state machine of a worker's end of one store: pushes and reads become messages, answers become finished tickets.

It keeps every update until each of its shards has answered Done, to send it again in order to the next primary of the
shard (StoreLeads): after a broken connection, when a server lacked a key list, when a server was lost or has
transferred the shard. Shards drop updates that they have. An update's sequence is (position of the run, number there),
the same in every incarnation of the worker: one that replays a step sends the same sequences again, and an update that
was applied before the loss is not applied twice.

Rows that are read are combined with own pushes that are not applied yet (row_cache.py). A read takes the rows that the
cache has and requests the others, each server once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from psctl.errors import ProtocolError
from psctl.ps.messages import Refused, WaitAnswer, WaitQuery
from psctl.ps.outputs import ToServer
from psctl.ps.table_messages import (
    ClocksFinished,
    Done,
    Fetched,
    KeysUnknown,
    PlainValue,
    Separation,
    ShardProgress,
    StoreLeads,
    StoreSpec,
    TableDescribed,
    TableFromServer,
    TableSpec,
    TableStats,
)
from psctl.ps.tables.client.calls_in_flight import (
    NO_SERVER,
    NO_TICKET,
    OpenDescriptions,
    PooledRoute,
    PushedRows,
    ReadPart,
    ServerSession,
    ShardChange,
    TableChange,
    TableRead,
    UnackedChanges,
    WantedSums,
    change_of_all,
    pooled_push,
    result,
    split_call,
    split_large_push,
    split_push,
)
from psctl.ps.tables.client.key_routes import KeyRoute, KeyRoutes
from psctl.ps.tables.client.row_cache import OwnPush
from psctl.ps.tables.client.row_view import ANY_CLOCK, RowView
from psctl.ps.tables.client.single_key_batches import BATCH_BYTES, PushBatch, ReadBatch
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_filters import PushNumbers
from psctl.ps.tables.table_kinds import Functions, TableKind
from psctl.ps.tables.table_packing import Allocate, PayloadReader, allocate_private
from psctl.ps.tables.table_state import FOREVER, first_sequence_at, spec_conflict

CLOCKS: tuple[Separation, ...] = ("clock", "common-clock")
"""Changes that end clocks."""


class TableClient:
    """One worker's end of one store.

    Args:
        spec: the store's.
        me: this worker's rank; one that is not of the group reads only.
        functions: reductions and users' functions.
        after: updates are numbered from the next on.
        allocate: returns memory for updates.
    """

    def __init__(
        self, spec: StoreSpec, me: int, functions: Functions, after: int = -1, allocate: Allocate = allocate_private
    ) -> None:
        self.spec, self.me = spec, me
        self.clock = 0
        """Clocks that this worker has finished."""
        self.refused: Refused | None = None
        self.wait_reasons: dict[int, list[int]] = {}
        self.finished: list[int] = []
        """Tickets that are done; the caller removes them."""
        self.rows: dict[int, torch.Tensor] = {}
        """By ticket of a `read_one` that is done: its row, which shares memory with others."""
        self.kinds: dict[str, TableKind] = {}
        self.stats: dict[tuple[str, int], TableStats] = {}
        """By table and shard: its counts, as described last."""
        self.routes = KeyRoutes(spec.shards)
        self._functions = functions
        self.outstanding = UnackedChanges()
        self._reads: dict[int, TableRead] = {}
        self._allocate = allocate
        self._push_batch = PushBatch(allocate)
        self._read_batches: dict[str, ReadBatch] = {}
        self._descriptions = OpenDescriptions()
        self._sequence = after
        self._sessions: dict[int, ServerSession] = {}  # by server
        self._leaders: dict[int, tuple[int, int]] = {}  # by shard: assignment, and server
        self._view = RowView(spec, self.kinds)
        self._own_clocks: dict[int, int] = {}  # by shard, once its progress was received
        self._done_before: dict[int, int] = {}  # by shard: what an earlier incarnation of this worker had done
        self._unsent = self._step = 0
        self._began = False

    # ---- tables --------------------------------------------------------------------------------------------------

    def resolve_kind(self, spec: TableSpec) -> TableKind:
        """Return a table's kind, which is known from now on.

        Raises:
            UsageError: the table has another specification, or this one is invalid; the script's fault.
        """
        kind = self.kinds.get(spec.name)
        if kind is None:
            kind = self.kinds[spec.name] = TableKind(spec, self._functions)
        elif kind.spec != spec:
            raise spec_conflict(kind.spec, spec)
        return kind

    def request_description(self, table: str, ticket: int) -> list[ToServer]:
        """Request a table's description from all shards; a known table is in `kinds` when the ticket is done."""
        self._descriptions.add(ticket, table, set(range(self.spec.shards)))
        return [out for session in self._sessions.values() for out in session.describe(ticket, table, session.shards)]

    @property
    def last_sequence(self) -> int:
        """The sequence of the newest update."""
        return self._sequence

    # ---- updates -------------------------------------------------------------------------------------------------

    def prepare_push(
        self,
        parts: Sequence[tuple[TableKind, KeyRoute, Lanes]],
        ticket: int,
        what: Literal["push", "start"] = "push",
        position: int = 0,
    ) -> list[TableChange]:
        """Return the changes to pass to `send_change`; the rows are visible to this worker from now on.

        Args:
            parts: tables, their keys, and a row for each of the route's unique keys.
            ticket: finished when all of it is done.
            what: "push", or "start": set rows that are not there.
            position: as `send_change`'s.
        """
        changes = []
        for chunk in split_large_push([self._filtered(*part, what, position) for part in parts], self.routes):
            shards, own_pushes = split_push(chunk, what, self.clock, self._allocate)
            own_pushes = self._not_done_before(own_pushes, position) if what == "push" else []
            self._view.add_own(own_pushes)
            size = sum(part.sent.values.nbytes for part in chunk)
            changes.append(TableChange(ticket, self.clock, shards, own_pushes, size))
        self.outstanding.expect(ticket, len(changes))
        self._unsent += len(changes)
        return changes

    def _filtered(
        self, kind: TableKind, route: KeyRoute, lanes: Lanes, what: Literal["push", "start"], position: int
    ) -> PushedRows:
        """Return what the table's filters leave of pushed rows."""
        if kind.filters is None or what != "push":
            return PushedRows(kind, route, lanes)
        sequence = max(first_sequence_at(position), self._sequence + self._unsent + 1)
        sent = kind.filters.on_push(route.unique, lanes.values, PushNumbers(sequence, self.clock, self.me))
        if not sent.kept.all():
            route = self.routes.route_of(kind.spec.name, route.unique[sent.kept.numpy()])
        extra = None if lanes.extra is None else lanes.extra[sent.kept]
        return PushedRows(kind, route, Lanes(sent.rows, extra), sent.coded)

    def _not_done_before(self, own_pushes: list[OwnPush], position: int) -> list[OwnPush]:
        """Return the part of a push that no earlier incarnation has done; rows from servers include the rest."""
        sequence = max(first_sequence_at(position), self._sequence + self._unsent + 1)
        return [own for own in own_pushes if sequence > self._done_before.get(own.shard, -1)]

    def prepare_call(
        self, kind: TableKind, route: KeyRoute | None, function: str, arguments: dict[str, PlainValue], ticket: int
    ) -> list[TableChange]:
        """Return the changes to pass to `send_change` that run a function on rows (None: on all) on their servers."""
        name = kind.spec.name
        self._view.forget(name)
        if route is not None:
            return self._prepare(split_call(name, route, function, arguments), ticket)
        return self._prepare(change_of_all(name, "call", function, arguments, self.spec.shards), ticket)

    def prepare_settings(self, kind: TableKind, settings: Mapping[str, float], ticket: int) -> list[TableChange]:
        """Return the changes to pass to `send_change` that set settings of a table's optimizer on all shards."""
        return self._prepare(change_of_all(kind.spec.name, "configure", "", {**settings}, self.spec.shards), ticket)

    def prepare_sums(self, route: PooledRoute, gradients: torch.Tensor, ticket: int) -> list[TableChange]:
        """Return the changes to pass to `send_change` that push gradients of sums of bags, one for each bag."""
        return self._prepare(pooled_push(route, gradients), ticket)

    def _prepare(self, shards: dict[int, list[ShardChange]], ticket: int) -> list[TableChange]:
        self.outstanding.expect(ticket, 1)
        self._unsent += 1
        return [TableChange(ticket, self.clock, shards, [])]

    def send_change(self, change: TableChange, position: int) -> list[ToServer]:
        """Give a change its sequence and return its messages.

        Args:
            position: the run's position, a number that never decreases; changes at one position are numbered from 0.
        """
        messages = self.flush()
        self._unsent -= change.what == "update"
        change.sequence = self._sequence = max(first_sequence_at(position), self._sequence + 1)
        self.outstanding.bytes_in_flight += change.bytes
        return messages + self._send_or_keep(change)

    def _send_or_keep(self, change: TableChange) -> list[ToServer]:
        for own in change.own_pushes:
            own.sequence = change.sequence
        if not change.shards:  # nothing was pushed
            self.finished += self.outstanding.finished_tickets(change)
            return []
        self.outstanding.add(change)
        return [
            out for session in self._sessions.values() for out in session.update(change, self.kinds, session.shards)
        ]

    # ---- one by one ----------------------------------------------------------------------------------------------

    def push_one(self, kind: TableKind, key: int, lanes: Lanes, ticket: int, position: int) -> list[ToServer]:
        """Push one row, which is copied; it may wait for others that leave with it (single_key_batches.py), until
        `flush`.

        Args:
            kind: a `batchable` one.
            position: as `send_change`'s.
        """
        first = first_sequence_at(position)
        messages = self.flush() if first > self._sequence and self._push_batch.tickets else []
        self._sequence = max(first, self._sequence + 1)
        self._push_batch.add(kind, key, lanes, self._sequence, ticket)
        self.outstanding.bytes_in_flight += kind.row_bytes
        if not self.outstanding or self._push_batch.bytes >= BATCH_BYTES:
            messages += self.flush()
        return messages

    def read_one(self, kind: TableKind, key: int, ticket: int) -> list[ToServer]:
        """Start to read one row, which is in `rows` when its ticket is finished; it may wait for others too."""
        batch = self._read_batches.setdefault(kind.spec.name, ReadBatch(kind))
        batch.keys.append(key)
        batch.tickets.append(ticket)
        full = len(batch.keys) * kind.row_bytes >= BATCH_BYTES
        return self.flush() if full or not self._reads else []

    def flush(self) -> list[ToServer]:
        """Return the messages of all single pushes and reads that wait."""
        messages: list[ToServer] = []
        if self._push_batch.tickets:
            shards, own_pushes, tickets, size = self._push_batch.take_all(
                self.routes.shard_order, self.clock, self._done_before
            )
            self._view.add_own(own_pushes)
            messages = self._send_or_keep(
                TableChange(NO_TICKET, self.clock, shards, own_pushes, size, self._sequence, singles=tickets)
            )
        batches, self._read_batches = self._read_batches, {}
        for batch in batches.values():
            route = self.routes.route_once(batch.kind.spec.name, np.array(batch.keys, dtype=np.int64))
            messages += self.start_read([(batch.kind, route)], batch.tickets[0], batch.tickets)[1]
        return messages

    def finish_clocks(self, clocks: int, position: int, ticket: int, *, common: bool = False) -> list[ToServer]:
        """End this worker's clocks up to the given number; all of its pushes were passed to `send_change` before.

        Args:
            clocks: more than have ended.
            position: as `send_change`'s.
            ticket: finished when all shards have the clock.
            common: end them for all workers, of which each has sent its pushes of these clocks.
        """
        messages = self.flush()  # of the clock that ends
        self.clock = clocks
        self._view.on_own_clock(self.read_clock)
        self.outstanding.expect(ticket, 1)
        return messages + self.send_change(
            self._change_everywhere(ticket, clocks, "common-clock" if common else "clock"), position
        )

    def mark_step(self, position: int, step: int, ticket: int = NO_TICKET, *, common: bool = False) -> list[ToServer]:
        """Mark a step: earlier changes belong to the checkpoint of `step`, later ones do not.

        Args:
            position: as `send_change`'s.
            step: the checkpoint's.
            ticket: finished when all shards have the mark; NO_TICKET: none is.
            common: mark it for all workers, of which each has sent the changes that belong to it.
        """
        self._step = step
        if ticket != NO_TICKET:
            self.outstanding.expect(ticket, 1)
        return self.send_change(self._change_everywhere(ticket, step, "common-mark" if common else "mark"), position)

    def leave(self, position: int, ticket: int) -> list[ToServer]:
        """Leave the store: no worker waits for this one's clocks and marks any more. Arguments as `finish_clocks`."""
        messages = self.flush()
        self.outstanding.expect(ticket, 1)
        clocks = self.spec.staleness is not None
        self.clock, self._step = FOREVER if clocks else self.clock, FOREVER
        return messages + self.send_change(
            self._change_everywhere(ticket, FOREVER, "clock" if clocks else "mark"), position
        )

    def _change_everywhere(self, ticket: int, clock: int, what: Separation) -> TableChange:
        return TableChange(ticket, clock, {shard: [] for shard in range(self.spec.shards)}, [], what=what)

    @property
    def shards_without_updates(self) -> set[int]:
        """Shards that do not have all updates yet."""
        return {shard for change in self.outstanding if change.what == "update" for shard in change.shards}

    def lagging_shards(self) -> set[int]:
        """Return the shards in which too few clocks of all workers are finished for this worker to proceed."""
        if self.spec.staleness is None or self.clock == FOREVER:
            return set()
        least = self.clock - self.spec.staleness
        return {shard for shard, clock in enumerate(self._view.clocks) if clock < least}

    def leaders_of(self, shards: Iterable[int]) -> set[int]:
        """Return the servers that lead these shards; NO_SERVER for shards without a leader."""
        return {self._leader_of(shard) for shard in shards}

    def _leader_of(self, shard: int) -> int:
        server = self._leaders.get(shard, (-1, NO_SERVER))[1]
        return server if server in self._sessions and shard in self._sessions[server].shards else NO_SERVER

    # ---- reads ---------------------------------------------------------------------------------------------------

    @property
    def read_clock(self) -> int:
        """The number of clocks, finished by all workers, that a read requires now."""
        return ANY_CLOCK if self.spec.staleness is None else self.clock - self.spec.staleness

    def start_read(
        self,
        parts: Sequence[tuple[TableKind, KeyRoute | range]],
        ticket: int,
        singles: Sequence[int] = (),
        ahead: int = 0,
    ) -> tuple[TableRead, list[ToServer]]:
        """Start a read; return it and the messages. It ends when its ticket, or all of its `singles`, are finished.

        Args:
            parts: tables and keys.
            ticket, singles: of the read.
            ahead: own clocks that will have ended when the rows are used.
        """
        messages = self.flush()
        read = self._view.start_read(parts, ticket, self.read_clock + ahead)
        read.singles, read.early = list(singles), ahead > 0 and self.spec.staleness == 0
        return self._begin_read(read, messages)

    def start_sums(self, route: PooledRoute, ticket: int) -> tuple[TableRead, list[ToServer]]:
        """Start a read of sums of bags of rows; return it and the messages."""
        messages = self.flush()
        return self._begin_read(self._view.start_sums(route, ticket, self.read_clock), messages)

    def _begin_read(self, read: TableRead, messages: list[ToServer]) -> tuple[TableRead, list[ToServer]]:
        if not read.shards:
            self._finish_read(read)
            return read, messages
        self._reads[read.ticket] = read
        return read, messages + [
            out for session in self._sessions.values() for out in session.fetch(read, session.shards)
        ]

    # ---- messages of servers -------------------------------------------------------------------------------------

    def on_server_message(self, server: int, message: TableFromServer, payload: memoryview) -> list[ToServer]:
        """Process a whole message of a server; return the messages to send.

        Raises:
            ProtocolError: the server violates the protocol.
        """
        match message:
            case StoreLeads():
                return self._on_leads(server, message)
            case Done():
                self._on_done(message)
                return [] if self.outstanding else self.flush()
            case Fetched():
                self._on_fetched(server, message, PayloadReader(payload))
                return [] if self._reads else self.flush()
            case ClocksFinished():
                for shard in message.shards:
                    self._view.on_clock(shard, message.clock)
            case TableDescribed():
                self._on_described(message)
            case KeysUnknown() if message.session == self._sessions[server].number:
                return self.start_session(server, self._step)
            case WaitAnswer():
                self.wait_reasons[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def start_session(self, server: int, step: int) -> list[ToServer]:
        """Begin a session with a server; when it announces its shards, all outstanding messages for them are sent.

        Args:
            step: the newest that this worker has marked.
        """
        self._step = max(step, self._step)  # a worker that has left stays out in a new session
        return [self._sessions.setdefault(server, ServerSession(self.spec, server)).start(self._step, self._sequence)]

    def _on_leads(self, server: int, message: StoreLeads) -> list[ToServer]:
        """Send all outstanding messages for the shards that a server leads, in order."""
        session = self._sessions[server]
        if message.session != session.number:
            return []
        session.term = max(session.term, message.term)
        new: set[int] = set()
        for at in message.shards:
            if message.epoch < self._leaders.get(at.shard, (-1, NO_SERVER))[0]:
                continue  # the server has not received the newer assignment yet
            for other in self._sessions.values():
                other.shards.discard(at.shard)
            self._leaders[at.shard] = (message.epoch, server)
            session.shards.add(at.shard)
            new.add(at.shard)
            self._on_progress(at)
            self._view.unwatch(at.shard)
        self.routes.group_by_leader([self._leaders.get(shard, (-1, NO_SERVER))[1] for shard in range(self.spec.shards)])
        messages = [out for change in self.outstanding for out in session.update(change, self.kinds, new)]
        messages += [out for read in self._reads.values() for out in session.fetch(read, new)]
        return messages + self._descriptions.resend(session, new)

    def wait_query(self, server: int) -> ToServer:
        """Return the query for the workers that delay this one."""
        return ToServer(server, WaitQuery(max(0, self.read_clock), self.spec.name))

    def shards_waited_for(self, ticket: int) -> set[int]:
        """Return the shards that have not finished a ticket."""
        found = self.outstanding.shards_waited_for(ticket)
        for read in self._reads.values():
            found |= set(read.shards) if ticket == read.ticket or ticket in read.singles else set()
        return found | self._descriptions.shards_waited_for(ticket)

    @property
    def is_open(self) -> bool:
        """Whether the progress of all shards was received."""
        return self._began

    def _on_progress(self, at: ShardProgress) -> None:
        """Resume from an earlier incarnation's progress; repeated clocks change nothing."""
        if at.shard not in self._own_clocks:
            self._done_before[at.shard] = at.sequence
        self._own_clocks[at.shard] = max(self._own_clocks.get(at.shard, -1), at.own)
        self._view.on_clock(at.shard, at.clock)
        if not self._began and len(self._own_clocks) == self.spec.shards:
            self.clock, self._began = max(self.clock, min(self._own_clocks.values())), True

    def _on_done(self, message: Done) -> None:
        for shard in message.shards:
            self._own_clocks[shard] = max(self._own_clocks.get(shard, -1), message.own)
            self._view.on_done(shard, message.sequence)
        for change in self.outstanding.on_done(message.sequence, message.shards):
            if change.what in CLOCKS and not any(each.what in CLOCKS for each in self.outstanding):
                self.clock = min(self.clock, max(self._own_clocks.values()))
            self.finished += self.outstanding.finished_tickets(change)

    def _on_described(self, message: TableDescribed) -> None:
        for shard, stats in zip(message.shards, message.stats, strict=True):
            self.stats[message.table, shard] = stats
        if message.spec is not None:
            self.resolve_kind(message.spec)
        if self._descriptions.on_answer(message):
            self.finished.append(message.ticket)

    def _on_fetched(self, server: int, message: Fetched, reader: PayloadReader) -> None:
        read, led = self._reads.get(message.ticket), self._sessions[server].shards
        answered: dict[int, list[ReadPart]] = {}
        for given in message.sections:
            if read is not None and given.shard in led and given.shard in read.shards:
                parts = read.shards.pop(given.shard) if given.final else read.shards[given.shard]
                answered.setdefault(given.shard, list(parts))
            parts = answered.get(given.shard, [])
            part = parts.pop(0) if parts else None
            if part is not None and part.asked.table != given.table:
                raise ProtocolError(
                    f"server/{server} answered a read of table {part.asked.table!r} with rows of {given.table!r}"
                )
            # Skips answers to repeated requests, and answers of servers that lead the shard no longer.
            unrequested = message.ticket < 0 and given.shard in led
            self._view.add_rows(given, part, reader, wanted=part is not None or unrequested)
        if read is not None and not read.shards:
            del self._reads[read.ticket]
            self._finish_read(read)

    def _finish_read(self, read: TableRead) -> None:
        if not read.singles:
            self.finished.append(read.ticket)
            return
        want = read.wants[0]
        assert not isinstance(want, WantedSums), "single reads are of rows"
        _, lanes = result(want)
        rows = lanes.values.view(-1, *want.kind.spec.shape)
        self.rows.update(zip(read.singles, rows.unbind(0), strict=True))
        self.finished += read.singles
