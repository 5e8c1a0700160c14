"""The mind of a worker's end of one store: pushes and reads in, messages out; messages in, finished tickets out.

It keeps every update until each server that has a part in it has said Done, to send it again in order when a connection
broke or a server did not know a key list; the server drops what it has. An update's sequence is (where the run is,
number there), whatever incarnation of the worker it is: one that replays a step says the same again, and what was taken
in before the death is not taken in twice.

What was pushed and is not applied yet is laid over what is read (table_cache.py). Reads take what the cache may give
and ask servers for the rest, each server once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from psctl.errors import ProtocolError
from psctl.store.reductions import Lanes
from psctl.store.rows import shard_of
from psctl.store.table_cache import Cache, Own, overlay
from psctl.store.table_calls import Change, Out, Piece, Place, Read, Scan, Voice, Want, chunks, pieces, scanned
from psctl.store.table_messages import (
    Advanced,
    Asked,
    Because,
    Described,
    Done,
    Fetched,
    Given,
    KeysUnknown,
    Refused,
    Section,
    StoreSpec,
    TableSpec,
    Why,
)
from psctl.store.table_packing import Reader
from psctl.store.table_routes import Route, Routes
from psctl.store.table_state import FOREVER, Functions, Kind, differs

ANY = -1
"""The clock of a read that takes whatever is there."""


class TableClient:
    """One worker's end of one store.

    Args:
        spec: the store's.
        me: this worker's rank; one that is not of the group reads only.
        owners: for each shard the rank of the server that holds it.
        functions: reductions and users' functions.
    """

    def __init__(self, spec: StoreSpec, me: int, owners: Sequence[int], functions: Functions) -> None:
        self.spec, self.me, self.owners = spec, me, list(owners)
        self.servers = sorted(set(owners))
        self.clock = 0
        """Clocks that this worker has finished."""
        self.refused: Refused | None = None
        self.because: dict[int, list[int]] = {}
        self.kept = 0
        """Bytes of rows that are kept until servers have them."""
        self.finished: list[int] = []
        """Tickets that are done; whoever drives the mind takes them out."""
        self.kinds: dict[str, Kind] = {}
        self.described: dict[int, TableSpec | None] = {}
        """By ticket of a Describe that is done."""
        self.routes = Routes(self.owners)
        self._functions = functions
        self._caches: dict[str, Cache] = {}
        self._owns: list[Own] = []
        self._changes: dict[int, Change] = {}  # by sequence, in order
        self._outstanding: dict[int, int] = {}  # by ticket: changes that are not done
        self._reads: dict[int, Read] = {}
        self._describes: dict[int, tuple[str, set[int]]] = {}
        self._sequence = -1
        self._voices = {server: Voice(spec, self.owners, server) for server in self.servers}
        self._heard = dict.fromkeys(self.servers, -1)
        self._own = dict.fromkeys(self.servers, -1)
        self._before = dict.fromkeys(self.servers, -1)  # what an earlier incarnation of this worker had done
        self._unsent = 0
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
        """Ask all servers what a table is; the answer stands in `described`."""
        self._describes[ticket] = (table, set(self.servers))
        return [voice.describe(ticket, table) for voice in self._voices.values()]

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
            owns = []
            for kind, route, lanes in chunk:
                if what == "push":
                    own = self._new(Own(kind.spec.name, route.unique, lanes, self.clock), place)
                    owns.append(own)
                    if kind.spec.name in self._caches:
                        self._caches[kind.spec.name].push(own)
            self._owns += owns
            size = sum(lanes.values.nbytes for _, _, lanes in chunk)
            changes.append(Change(ticket, self.clock, pieces(chunk, what), owns, size))
        self._outstanding[ticket] = len(changes)
        self._unsent += len(changes)
        return changes

    def _new(self, own: Own, place: int) -> Own:
        """Return what of a push an earlier incarnation has not done: the rest is in what servers send."""
        sequence = max(place << 32, self._sequence + self._unsent + 1)
        done = [server for server, last in self._before.items() if sequence <= last]
        if done:
            holders = np.array(self.owners)[shard_of(own.table, own.keys, len(self.owners))]
            new = ~np.isin(holders, done)
            own.keys, own.lanes = own.keys[new], own.lanes.at(torch.from_numpy(new))
        return own

    def call(
        self, kind: Kind, route: Route | None, function: str, arguments: dict[str, Any], ticket: int
    ) -> list[Change]:
        """Return what is to be given to `send`: run a function on rows (None: on all) where they lie."""
        servers: dict[int, list[Piece]] = {}
        if route is None:
            for shard, owner in enumerate(self.owners):
                section = Section(shard, kind.spec.name, -1, "call", None, b"", function, arguments)
                servers.setdefault(owner, []).append(Piece(section, None, b"", None))
        else:
            for stop in route.stops:
                section = Section(stop.shard, kind.spec.name, len(stop.keys), "call", None, b"", function, arguments)
                servers.setdefault(stop.server, []).append(Piece(section, stop.keys, stop.digest, None))
        if kind.spec.name in self._caches:
            self._caches[kind.spec.name].forget()
        self._outstanding[ticket] = 1
        self._unsent += 1
        return [Change(ticket, self.clock, servers, [])]

    def send(self, change: Change, place: int) -> list[Out]:
        """Give a change its sequence and return its messages.

        Args:
            place: where the run is, a number that never falls; changes in one place are numbered from 0.
        """
        self._unsent -= not change.advance
        change.sequence = self._sequence = max(place << 32, self._sequence + 1)
        for own in change.owns:
            own.sequence = change.sequence
        if not change.servers and not change.advance:  # nothing was pushed
            self._done(change)
            return []
        self._changes[change.sequence] = change
        self.kept += change.bytes
        return [self._voices[server].update(change, self.kinds) for server in change.servers]

    def advance(self, place: int, ticket: int, *, leave: bool = False) -> list[Out]:
        """End this worker's clock; everything that was pushed in it was given to `send`.

        Args:
            place: as `send`'s.
            ticket: finished when all servers know.
            leave: this was the last one; nobody waits for this worker any more.
        """
        self.clock = FOREVER if leave else self.clock + 1
        self._outstanding[ticket] = 1
        change = Change(ticket, self.clock, {server: [] for server in self.servers}, [], advance=True)
        return self.send(change, place)

    def behind(self, clock: int | None = None) -> set[int]:
        """Return the servers that have not heard of enough clocks of all for this worker to go on."""
        if self.spec.staleness is None or self.clock == FOREVER:
            return set()
        least = (self.clock if clock is None else clock) - self.spec.staleness
        return {server for server, heard in self._heard.items() if heard < least}

    # ---- reads ---------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> int:
        """How many clocks of all a read wants now."""
        return ANY if self.spec.staleness is None else self.clock - self.spec.staleness

    def read(self, parts: Sequence[tuple[Kind, Route | range]], ticket: int) -> tuple[Read, list[Out]]:
        """Begin a read; return it, and what is to be sent. It is finished when its ticket is."""
        read = Read(ticket, self.reading, [], {})
        for kind, keys in parts:
            read.wants.append(self._scan(read, kind, keys) if isinstance(keys, range) else self._want(read, kind, keys))
        if not read.servers:
            self.finished.append(ticket)
            return read, []
        self._reads[ticket] = read
        return read, [self._voices[server].fetch(read) for server in read.servers]

    def _want(self, read: Read, kind: Kind, route: Route) -> Want:
        count = len(route.unique)
        want = Want(kind, route.unique, np.zeros(count, dtype=bool), kind.rows().empty(count), None)
        want.inverse = None if route.plain else route.inverse
        missing = np.ones(count, dtype=bool)
        if read.clock != ANY:
            cache = self._caches.setdefault(kind.spec.name, Cache(kind))
            floors = np.array([self._heard.get(server, -1) for server in range(max(self.servers) + 1)])
            fresh = cache.fresh(route.unique, read.clock, floors if self.spec.eager else None)
            if fresh.any():
                want.lanes.put(torch.from_numpy(fresh), cache.read(route.unique[fresh]))
                want.there |= fresh
                missing &= ~fresh
        for stop in route.stops:
            at, keys, digest = stop.at, stop.keys, stop.digest
            left = missing[at]
            if not left.all():
                at, keys, digest = at[left], keys[left], b""
            if len(keys):
                asked = Asked(stop.shard, kind.spec.name, len(keys))
                read.servers.setdefault(stop.server, []).append(Place(asked, keys, digest, want, at))
        return want

    def _scan(self, read: Read, kind: Kind, keys: range) -> Scan:
        scan = Scan(kind, keys.start, keys.stop)
        none = np.empty(0, dtype=np.int64)
        for shard, owner in enumerate(self.owners):
            asked = Asked(shard, kind.spec.name, -1, keys.start, keys.stop)
            read.servers.setdefault(owner, []).append(Place(asked, none, b"", scan, none))
        return scan

    # ---- what servers say ----------------------------------------------------------------------------------------

    def received(self, server: int, message: Any, payload: memoryview) -> list[Out]:
        """Take in a whole message of a server; return what is to be sent.

        Raises:
            ProtocolError: the server does not keep to the protocol.
        """
        match message:
            case Done():
                self._taken(server, message.sequence)
            case Fetched():
                self._fetched(server, message, Reader(payload))
            case Advanced():
                self._know(server, message)
                self._heard[server] = max(self._heard[server], message.clock)
                if self.spec.staleness == 0:
                    least = min(self._heard.values())
                    self._owns = [own for own in self._owns if own.clock >= least]
            case Described():
                self._is(server, message)
            case KeysUnknown() if message.session == self._voices[server].session:
                return self.anew(server)
            case Because():
                self.because[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def anew(self, server: int) -> list[Out]:
        """Begin a new session with a server (the first one too): return all that it must be told again, in order."""
        for cache in self._caches.values():
            cache.unwatch(server)
        voice = self._voices[server]
        outs = [voice.anew()]
        outs += [voice.update(change, self.kinds) for change in self._changes.values() if server in change.servers]
        outs += [voice.fetch(read) for read in self._reads.values() if server in read.servers]
        asked = [(ticket, table) for ticket, (table, waiting) in self._describes.items() if server in waiting]
        return outs + [voice.describe(ticket, table) for ticket, table in asked]

    def ask(self, server: int) -> Out:
        """Return the question who keeps this worker waiting."""
        return Out(server, Why(self.spec.name, max(0, self.reading)))

    def waiting_for(self, ticket: int) -> set[int]:
        """Return the servers that have not finished a ticket."""
        found = {server for change in self._changes.values() if change.ticket == ticket for server in change.servers}
        if ticket in self._reads:
            found |= set(self._reads[ticket].servers)
        return found | self._describes.get(ticket, ("", set()))[1]

    @property
    def opened(self) -> bool:
        """Have all servers answered?"""
        return self._began

    def _know(self, server: int, message: Advanced) -> None:
        """Begin where an earlier incarnation was; what it said of its clocks and is said again moves nothing."""
        if self._own[server] < 0:
            self._before[server] = message.sequence
        self._own[server] = max(self._own[server], message.own)
        if not self._began and min(self._own.values()) >= 0:
            self.clock, self._began = max(self.clock, min(self._own.values())), True

    def _taken(self, server: int, sequence: int) -> None:
        change = self._changes.get(sequence)
        if change is None:
            return
        change.servers.pop(server, None)
        if not change.servers:
            del self._changes[sequence]
            self.kept -= change.bytes
            if change.advance and not any(each.advance for each in self._changes.values()):
                self.clock = min(self.clock, max(self._own.values()))
            self._done(change)

    def _done(self, change: Change) -> None:
        if self.spec.staleness != 0 and change.owns:
            self._owns = [own for own in self._owns if own not in change.owns]
        self._outstanding[change.ticket] -= 1
        if not self._outstanding[change.ticket]:
            del self._outstanding[change.ticket]
            self.finished.append(change.ticket)

    def _is(self, server: int, message: Described) -> None:
        if message.ticket not in self._describes:
            return
        table, waiting = self._describes[message.ticket]
        waiting.discard(server)
        if message.spec is not None:
            self.settle(message.spec)
        if not waiting:
            del self._describes[message.ticket]
            kind = self.kinds.get(table)
            self.described[message.ticket] = kind.spec if kind is not None else None
            self.finished.append(message.ticket)

    def _fetched(self, server: int, message: Fetched, reader: Reader) -> None:
        read = self._reads.get(message.ticket)
        if message.ticket >= 0 and (read is None or server not in read.servers):
            return  # asked twice, after a broken connection
        places = read.servers.pop(server) if read is not None else []
        for index, given in enumerate(message.sections):
            place = places[index] if read is not None else None
            if place is not None and (place.asked.shard, place.asked.table) != (given.shard, given.table):
                raise ProtocolError(f"server/{server} answered what was not asked")
            self._given(server, message, given, place, reader)
        if read is not None and not read.servers:
            del self._reads[read.ticket]
            self.finished.append(read.ticket)

    def _given(self, server: int, message: Fetched, given: Given, place: Place | None, reader: Reader) -> None:
        """Take one table's rows out of an answer, lay own pushes over them, put them where they are wanted."""
        kind = self.kinds[given.table]
        keys = place.keys if place is not None and not given.keys else reader.keys(max(0, given.count))
        if given.count < 0:  # the table is not there yet
            held, lanes = np.zeros(len(keys), dtype=bool), kind.rows().empty(len(keys))
        else:
            held = reader.array(given.count, np.uint8).astype(bool)
            lanes = reader.lanes(given.count, kind.spec.width, kind.dtype, kind.held_beside)
        owns = [own for own in self._owns if own.table == given.table and not self._included(own, message)]
        want = place.want if place is not None else None
        if isinstance(want, Scan):
            want.found.append(scanned(want, (given.shard, len(self.owners)), keys, held, lanes, owns))
            return
        there, lanes = overlay(kind, keys, held, lanes, owns)
        if self.spec.staleness is not None:
            cache = self._caches.setdefault(given.table, Cache(kind))
            cache.put(server, keys, there, lanes, message.clock, held)
        if want is not None and place is not None:
            want.lanes.put(torch.from_numpy(place.at), lanes)
            want.there[place.at] = there

    def _included(self, own: Own, message: Fetched) -> bool:
        if own.sequence is None:
            return False
        return own.clock < message.clock if self.spec.staleness == 0 else own.sequence <= message.sequence
