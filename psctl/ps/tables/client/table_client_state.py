"""The mind of a worker's end of one store: pushes and reads in, messages out; messages in, finished tickets out.

It keeps every update until each shard that it touches has said Done, to send it again in order to whoever comes to lead
the shard (Leads): after a broken connection, when a server did not know a key list, when a server died or handed the
shard over. Shards drop what they have. An update's sequence is (where the run is, number there), whatever incarnation
of the worker it is: one that replays a step says the same again, and what was taken in before the death is not taken in
twice.

What was pushed and is not applied yet is laid over what is read (row_cache.py). Reads take what the cache may give
and ask servers for the rest, each server once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from psctl.errors import ProtocolError
from psctl.ps.table_messages import (
    Advanced,
    Because,
    Described,
    Done,
    Fetched,
    KeysUnknown,
    Leads,
    Refused,
    ShardAt,
    StoreSpec,
    TableSpec,
    Why,
)
from psctl.ps.tables.client.calls_in_flight import Change, Out, Place, Read, Voice, called, chunks, pieces, result
from psctl.ps.tables.client.key_routes import Route, Routes
from psctl.ps.tables.client.row_cache import Own
from psctl.ps.tables.client.row_view import ANY, Known
from psctl.ps.tables.client.single_key_batches import ROOM, Pushes, Reads
from psctl.ps.tables.client.unacked_calls import NOBODY, Outstanding, Questions
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.table_kinds import Functions, Kind
from psctl.ps.tables.table_packing import Reader, Room, private
from psctl.ps.tables.table_state import FOREVER, differs, first_of


class TableClient:
    """One worker's end of one store.

    Args:
        spec: the store's.
        me: this worker's rank; one that is not of the group reads only.
        functions: reductions and users' functions.
        after: updates are numbered from the next on.
        room: where the memory of updates comes from.
    """

    def __init__(self, spec: StoreSpec, me: int, functions: Functions, after: int = -1, room: Room = private) -> None:
        self.spec, self.me = spec, me
        self.clock = 0
        """Clocks that this worker has finished."""
        self.refused: Refused | None = None
        self.because: dict[int, list[int]] = {}
        self.finished: list[int] = []
        """Tickets that are done; whoever drives the mind takes them out."""
        self.rows: dict[int, torch.Tensor] = {}
        """By ticket of a `read_one` that is done: its row, which shares memory with others."""
        self.kinds: dict[str, Kind] = {}
        self.routes = Routes(spec.shards)
        self._functions = functions
        self.outstanding = Outstanding()
        self._reads: dict[int, Read] = {}
        self._room = room
        self._singles, self._alone = Pushes(room), dict[str, Reads]()  # pushes and reads of one row that wait
        self._questions = Questions()
        self._sequence = after
        self._voices: dict[int, Voice] = {}  # by server
        self._leader: dict[int, tuple[int, int]] = {}  # by shard: assignment, and server
        self._known = Known(spec, self.kinds)
        self._own: dict[int, int] = {}  # by shard, once it was heard of
        self._before: dict[int, int] = {}  # by shard: what an earlier incarnation of this worker had done
        self._unsent = self._step = 0
        self._began = False

    # ---- tables --------------------------------------------------------------------------------------------------

    def settle(self, spec: TableSpec) -> Kind:
        """Return a table's kind, which is known from now on.

        Raises:
            UsageError: it is another already, or cannot be; the script's fault.
        """
        kind = self.kinds.get(spec.name)
        if kind is None:
            kind = self.kinds[spec.name] = Kind(spec, self._functions)
        elif kind.spec != spec:
            raise differs(kind.spec, spec)
        return kind

    def describe(self, table: str, ticket: int) -> list[Out]:
        """Ask who leads any shard what a table is; if it is anything, it stands in `kinds` when the ticket is done."""
        self._questions.ask(ticket, table, set(range(self.spec.shards)))
        return [out for voice in self._voices.values() for out in voice.describe(ticket, table, voice.shards)]

    @property
    def last(self) -> int:
        """The sequence of the newest update."""
        return self._sequence

    # ---- updates -------------------------------------------------------------------------------------------------

    def push(
        self, parts: Sequence[tuple[Kind, Route, Lanes]], ticket: int, what: str = "push", place: int = 0
    ) -> list[Change]:
        """Return what is to be given to `send`; the rows are visible to this worker from now on.

        Args:
            parts: tables, their keys, and a row for each of the route's unique keys.
            ticket: finished when all of it is done.
            what: "push", or "start": set rows that are not there.
            place: as `send`'s.
        """
        changes = []
        for chunk in chunks(parts, self.routes):
            shards, owns = pieces(chunk, what, self.clock, self._room)
            owns = self._new(owns, place) if what == "push" else []
            self._known.pushed(owns)
            size = sum(lanes.values.nbytes for _, _, lanes in chunk)
            changes.append(Change(ticket, self.clock, shards, owns, size))
        self.outstanding.expect(ticket, len(changes))
        self._unsent += len(changes)
        return changes

    def _new(self, owns: list[Own], place: int) -> list[Own]:
        """Return what of a push an earlier incarnation has not done: the rest is in what servers send."""
        sequence = max(first_of(place), self._sequence + self._unsent + 1)
        return [own for own in owns if sequence > self._before.get(own.shard, -1)]

    def call(
        self, kind: Kind, route: Route | None, function: str, arguments: dict[str, Any], ticket: int
    ) -> list[Change]:
        """Return what is to be given to `send`: run a function on rows (None: on all) where they lie."""
        shards = called(kind.spec.name, route, function, arguments, self.spec.shards)
        self._known.forget(kind.spec.name)
        self.outstanding.expect(ticket, 1)
        self._unsent += 1
        return [Change(ticket, self.clock, shards, [])]

    def send(self, change: Change, place: int) -> list[Out]:
        """Give a change its sequence and return its messages.

        Args:
            place: where the run is, a number that never falls; changes in one place are numbered from 0.
        """
        outs = self.flush()
        self._unsent -= change.what == "update"
        change.sequence = self._sequence = max(first_of(place), self._sequence + 1)
        self.outstanding.kept += change.bytes
        return outs + self._say(change)

    def _say(self, change: Change) -> list[Out]:
        for own in change.owns:
            own.sequence = change.sequence
        if not change.shards:  # nothing was pushed
            self.finished += self.outstanding.done(change)
            return []
        self.outstanding.add(change)
        return [out for voice in self._voices.values() for out in voice.update(change, self.kinds, voice.shards)]

    # ---- one by one ----------------------------------------------------------------------------------------------

    def push_one(self, kind: Kind, key: int, lanes: Lanes, ticket: int, place: int) -> list[Out]:
        """Push one row, which is copied; it may wait for others that leave with it (single_key_batches.py), until
        `flush`.

        Args:
            kind: one that `fits`.
            place: as `send`'s.
        """
        first = first_of(place)
        outs = self.flush() if first > self._sequence and self._singles.tickets else []
        self._sequence = max(first, self._sequence + 1)
        self._singles.add(kind, key, lanes, self._sequence, ticket)
        self.outstanding.kept += kind.row
        if not self.outstanding or self._singles.bytes >= ROOM:
            outs += self.flush()
        return outs

    def read_one(self, kind: Kind, key: int, ticket: int) -> list[Out]:
        """Begin to read one row, which stands in `rows` when its ticket is finished; it may wait for others too."""
        alone = self._alone.setdefault(kind.spec.name, Reads(kind))
        alone.keys.append(key)
        alone.tickets.append(ticket)
        full = len(alone.keys) * kind.row >= ROOM
        return self.flush() if full or not self._reads else []

    def flush(self) -> list[Out]:
        """Return the messages of all single pushes and reads that wait."""
        outs: list[Out] = []
        if self._singles.tickets:
            shards, owns, tickets, size = self._singles.take(self.routes.turns, self.clock, self._before)
            self._known.pushed(owns)
            outs = self._say(Change(NOBODY, self.clock, shards, owns, size, self._sequence, singles=tickets))
        alone, self._alone = self._alone, {}
        for each in alone.values():
            route = self.routes.once(each.kind.spec.name, np.array(each.keys, dtype=np.int64))
            outs += self.read([(each.kind, route)], each.tickets[0], each.tickets)[1]
        return outs

    def advance(self, place: int, ticket: int) -> list[Out]:
        """End this worker's clock; everything that was pushed in it was given to `send`.

        Args:
            place: as `send`'s.
            ticket: finished when all shards know.
        """
        outs = self.flush()  # of the clock that ends
        self.clock += 1
        self.outstanding.expect(ticket, 1)
        return outs + self.send(self._everywhere(ticket, self.clock, "clock"), place)

    def mark(self, place: int, step: int) -> list[Out]:
        """Say that what was given to `send` belongs into the checkpoint of `step`, and what comes now does not."""
        self._step = step
        return self.send(self._everywhere(NOBODY, step, "mark"), place)

    def leave(self, place: int, ticket: int) -> list[Out]:
        """Take leave: nobody waits for this worker's clocks and marks any more. Arguments as `advance`."""
        outs = self.flush()
        self.outstanding.expect(ticket, 1)
        clocks = self.spec.staleness is not None
        self.clock, self._step = FOREVER if clocks else self.clock, FOREVER
        return outs + self.send(self._everywhere(ticket, FOREVER, "clock" if clocks else "mark"), place)

    def _everywhere(self, ticket: int, clock: int, what: Literal["clock", "mark"]) -> Change:
        return Change(ticket, clock, {shard: [] for shard in range(self.spec.shards)}, [], what=what)

    @property
    def updates(self) -> set[int]:
        """Shards that do not have all updates yet."""
        return {shard for change in self.outstanding if change.what == "update" for shard in change.shards}

    def behind(self, clock: int | None = None) -> set[int]:
        """Return the shards that have not heard of enough clocks of all for this worker to go on."""
        if self.spec.staleness is None or self.clock == FOREVER:
            return set()
        least = (self.clock if clock is None else clock) - self.spec.staleness
        return {shard for shard, heard in enumerate(self._known.heard) if heard < least}

    def leaders(self, shards: Iterable[int]) -> set[int]:
        """Return the servers that lead these shards; NOBODY for shards without a leader."""
        return {self._leader_of(shard) for shard in shards}

    def _leader_of(self, shard: int) -> int:
        server = self._leader.get(shard, (-1, NOBODY))[1]
        return server if server in self._voices and shard in self._voices[server].shards else NOBODY

    # ---- reads ---------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> int:
        """How many clocks of all a read wants now."""
        return ANY if self.spec.staleness is None else self.clock - self.spec.staleness

    def read(
        self, parts: Sequence[tuple[Kind, Route | range]], ticket: int, singles: Sequence[int] = ()
    ) -> tuple[Read, list[Out]]:
        """Begin a read; return it, and what is to be sent. It is finished when its ticket is, or all of its singles."""
        outs = self.flush()
        read = self._known.read(parts, ticket, self.reading)
        read.singles = list(singles)
        if not read.shards:
            self._found(read)
            return read, outs
        self._reads[ticket] = read
        return read, outs + [out for voice in self._voices.values() for out in voice.fetch(read, voice.shards)]

    # ---- what servers say ----------------------------------------------------------------------------------------

    def received(self, server: int, message: Any, payload: memoryview) -> list[Out]:
        """Take in a whole message of a server; return what is to be sent.

        Raises:
            ProtocolError: the server does not keep to the protocol.
        """
        match message:
            case Leads():
                return self._leads(server, message)
            case Done():
                self._taken(message)
                return [] if self.outstanding else self.flush()
            case Fetched():
                self._fetched(server, message, Reader(payload))
                return [] if self._reads else self.flush()
            case Advanced():
                for shard in message.shards:
                    self._known.hear(shard, message.clock)
            case Described():
                self._is(message)
            case KeysUnknown() if message.session == self._voices[server].session:
                return self.anew(server, self._step)
            case Because():
                self.because[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def anew(self, server: int, step: int) -> list[Out]:
        """Begin a new session with a server (the first one too); what it leads it says, and is told again then.

        Args:
            step: the newest that this worker has marked.
        """
        self._step = max(step, self._step)  # who has left does not come back by beginning anew
        return [self._voices.setdefault(server, Voice(self.spec, server)).anew(self._step, self._sequence)]

    def _leads(self, server: int, message: Leads) -> list[Out]:
        """Say all that is outstanding for the shards that a server leads, in order."""
        voice = self._voices[server]
        if message.session != voice.session:
            return []
        voice.term = max(voice.term, message.term)
        new: set[int] = set()
        for at in message.shards:
            if message.epoch < self._leader.get(at.shard, (-1, NOBODY))[0]:
                continue  # it does not know yet that it leads no more
            for other in self._voices.values():
                other.shards.discard(at.shard)
            self._leader[at.shard] = (message.epoch, server)
            voice.shards.add(at.shard)
            new.add(at.shard)
            self._know(at)
            self._known.unwatch(at.shard)
        self.routes.arrange([self._leader.get(shard, (-1, NOBODY))[1] for shard in range(self.spec.shards)])
        outs = [out for change in self.outstanding for out in voice.update(change, self.kinds, new)]
        outs += [out for read in self._reads.values() for out in voice.fetch(read, new)]
        return outs + self._questions.again(voice, new)

    def ask(self, server: int) -> Out:
        """Return the question who keeps this worker waiting."""
        return Out(server, Why(self.spec.name, max(0, self.reading)))

    def waiting_for(self, ticket: int) -> set[int]:
        """Return the shards that have not finished a ticket."""
        found = self.outstanding.waiting_for(ticket)
        for read in self._reads.values():
            found |= set(read.shards) if ticket == read.ticket or ticket in read.singles else set()
        return found | self._questions.waiting_for(ticket)

    @property
    def opened(self) -> bool:
        """Were all shards heard of?"""
        return self._began

    def _know(self, at: ShardAt) -> None:
        """Begin where an earlier incarnation was; what it said of its clocks and is said again moves nothing."""
        if at.shard not in self._own:
            self._before[at.shard] = at.sequence
        self._own[at.shard] = max(self._own.get(at.shard, -1), at.own)
        self._known.hear(at.shard, at.clock)
        if not self._began and len(self._own) == self.spec.shards:
            self.clock, self._began = max(self.clock, min(self._own.values())), True

    def _taken(self, message: Done) -> None:
        for shard in message.shards:
            self._own[shard] = max(self._own.get(shard, -1), message.own)
            self._known.done(shard, message.sequence)
        for change in self.outstanding.taken(message.sequence, message.shards):
            if change.what == "clock" and not any(each.what == "clock" for each in self.outstanding):
                self.clock = min(self.clock, max(self._own.values()))
            self.finished += self.outstanding.done(change)

    def _is(self, message: Described) -> None:
        if message.spec is not None:
            self.settle(message.spec)
        if self._questions.answered(message):
            self.finished.append(message.ticket)

    def _fetched(self, server: int, message: Fetched, reader: Reader) -> None:
        read, led = self._reads.get(message.ticket), self._voices[server].shards
        answered: dict[int, list[Place]] = {}
        for given in message.sections:
            if read is not None and given.shard in led and given.shard in read.shards:
                answered[given.shard] = read.shards.pop(given.shard)
            places = answered.get(given.shard, [])
            place = places.pop(0) if places else None
            if place is not None and place.asked.table != given.table:
                raise ProtocolError(f"server/{server} answered what was not asked")
            # What was asked twice and answered before is left out, and what comes of who leads the shard no more.
            news = message.ticket < 0 and given.shard in led
            self._known.given(given, place, reader, wanted=place is not None or news)
        if read is not None and not read.shards:
            del self._reads[read.ticket]
            self._found(read)

    def _found(self, read: Read) -> None:
        if not read.singles:
            self.finished.append(read.ticket)
            return
        _, lanes = result(read.wants[0])
        rows = lanes.values.view(-1, *read.wants[0].kind.spec.shape)
        self.rows.update(zip(read.singles, rows.unbind(0), strict=True))
        self.finished += read.singles
