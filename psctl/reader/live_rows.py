"""Reads rows of the job's stores from the servers, as they are when they are read.

A server answers for the shards that it leads and says which ones; keys are sent to the servers that led their shards in
the last answers. What is not answered, because shards have moved or a server is lost, is asked again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from psctl.client.server_connections import Dial, ServerConnections
from psctl.errors import ConnectionFailed, UsageError
from psctl.job.table_server_messages import TablesAt
from psctl.kv import arguments as given
from psctl.permits import WireMessage
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import KeysRead, ReadKeys, TableSpec
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import Keys, shard_of
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import bytes_of
from psctl.reader.reader_session import ReaderSession
from psctl.transport.peer_connection import PeerConnection

LOOK = 0.2
"""Seconds until a question is asked again that no server could answer yet."""

PATIENCE = 60.0
"""Seconds for which a store, or a key, that does not exist is awaited: workers may open it yet."""

LAST_PATIENCE = 5.0
"""The same when training has ended: for the connections to the servers alone."""

AT_ONCE = 1 << 18
"""Most keys of one request."""


class RowsAnswer(NamedTuple):
    """An answer and its payload."""

    message: KeysRead
    rows: bytes


class LiveRows:
    """Reads rows; also the handler of the connections to the servers of tables. One read at a time.

    Args:
        session: with the coordinator.
        dial: connects to a server's tables.
        folder: the job's code, from which users' functions are imported.
    """

    def __init__(self, session: ReaderSession, dial: Dial, folder: str) -> None:
        self._session, self._changed = session, session.changed
        self._connections = ServerConnections(dial, self, lambda at, error: None)
        self._functions = JobFunctions(folder)
        self._reading = threading.Lock()
        self._epoch = -1
        self._ticket = 0
        self._answers: dict[int, RowsAnswer] = {}  # by server, of this ticket
        self._leaders: dict[int, int] = {}  # shard -> server; replaced, never changed
        self._specs: dict[tuple[str, str], TableSpec] = {}  # by store and table, which never change
        self._shards = 0
        self._asked = False

    def close(self, reason: str) -> None:
        """End all connections."""
        self._connections.close(reason, 1.0)

    def read(self, store: str, table: str, keys: Keys) -> tuple[TableSpec, Array]:
        """Return the description of a table, and the bytes of its rows: (keys, bytes of a row), start values for absent
        keys.

        Args:
            store: its name.
            table: a named key, all of whose blocks are read; "": `keys` are read.
            keys: distinct ones, with `table` "".

        Raises:
            UsageError: there is no such store or key, or a row is too large.
        """
        with self._reading:
            if not self._asked:
                self._asked = True
                self._session.tables(self._on_tables)
            spec = self._specs.get((store, table)) or self._find(store, table)
            self._specs[store, table] = spec
            if table:
                keys = np.arange(spec.blocks)
            kind = TableKind(spec, self._functions)
            rows = np.empty((len(keys), spec.width * kind.dtype.itemsize), dtype=np.uint8)
            for first in range(0, len(keys), AT_ONCE):
                part = slice(first, first + AT_ONCE)
                self._read_part(store, table, keys[part], kind, rows[part])
            return spec, rows

    def _find(self, store: str, table: str) -> TableSpec:
        """Ask all servers for a table, until one has it; note which shards each leads."""
        began, stores = time.monotonic(), set[str]()
        while True:
            answers = list(self._ask(dict.fromkeys(self._connections.in_use, b""), store, table).values())
            stores |= {name for each in answers for name in each.message.stores}
            found = next((each.message.spec for each in answers if each.message.spec is not None), None)
            if found is not None and len(self._leaders) == self._shards > 0:
                return found
            patience = LAST_PATIENCE if self._session.has_training_ended else PATIENCE
            if found is None and time.monotonic() - began > patience:
                break
            with self._changed:
                self._changed.wait(LOOK)
        known = ", ".join(sorted(stores)) or "none"
        what = f"no key {table!r}" if table else "no rows of integer keys"
        if store in stores:
            raise UsageError(f"store {store!r} has {what}", "workers make it with their first push, or declare it")
        raise UsageError(
            f"the job has no store {store!r}; it has: {known}", "a store exists when a worker has opened it"
        )

    def _read_part(self, store: str, table: str, keys: Keys, kind: TableKind, rows: Array) -> None:
        """Read the rows of some keys; ask again until all are there."""
        of = shard_of(table, keys, self._shards)
        missing = np.ones(len(keys), dtype=bool)
        while missing.any():
            before = int(missing.sum())
            wanted, leaders = dict[int, Keys](), self._leaders
            for server in set(leaders.values()):
                led = [shard for shard, one in leaders.items() if one == server]
                at = np.flatnonzero(missing & np.isin(of, led))
                if len(at):
                    wanted[server] = at
            payloads = {server: b"" if table else keys[at].tobytes() for server, at in wanted.items()}
            for server, (message, data) in self._ask(payloads, store, table).items():
                if message.problem == "large":
                    self._halve(store, table, keys, kind, rows)
                    return
                asked = np.arange(len(keys)) if table else wanted[server]
                at = asked[np.isin(of[asked], message.led)]
                if message.problem or not len(at):
                    continue
                if message.spec is None:  # no key of these shards has a row yet
                    rows[at] = bytes_of(kind.initial_rows(keys[at]).values.contiguous()).reshape(len(at), -1)
                else:
                    rows[at] = np.frombuffer(data, dtype=np.uint8).reshape(len(at), -1)
                missing[at] = False
            if int(missing.sum()) == before:  # shards have moved, or a server is lost
                with self._changed:
                    self._changed.wait(LOOK)
                self._ask(dict.fromkeys(self._connections.in_use, b""), store, "")

    def _halve(self, store: str, table: str, keys: Keys, kind: TableKind, rows: Array) -> None:
        """Read in two parts what exceeds one answer."""
        if table or len(keys) < 2:
            raise UsageError(f"a row of store {store!r} has more bytes than an answer may", "read a smaller row")
        half = len(keys) // 2
        self._read_part(store, table, keys[:half], kind, rows[:half])
        self._read_part(store, table, keys[half:], kind, rows[half:])

    def _ask(self, payloads: dict[int, bytes], store: str, table: str) -> dict[int, RowsAnswer]:
        """Send a question to servers; return their answers, without those of servers that are lost."""
        with self._changed:
            self._ticket += 1
            self._answers = {}
            message = ReadKeys(self._ticket, store, table)
        for server, payload in payloads.items():
            self._connections.send(server, message, memoryview(payload) if payload else None)
        with self._changed:
            until = time.monotonic() + PATIENCE
            while len(self._answers) < len(payloads) and time.monotonic() < until:
                if not all(server in self._connections.in_use or server in self._answers for server in payloads):
                    break
                self._changed.wait(LOOK)
            self._ticket += 1  # what comes later is dropped
            return self._answers

    def _on_tables(self, message: TablesAt) -> None:
        with self._changed:
            if message.epoch < self._epoch or not message.servers:
                return
            self._epoch, self._shards = message.epoch, message.shards
        self._connections.assign(message.servers)

    # ---- the handler: each connection's reader thread ----------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Wake a read that waits for servers."""
        with self._changed:
            self._changed.notify_all()

    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        """Return None: the payload is copied."""
        return None

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        """Take an answer, and note which shards its sender leads."""
        if not isinstance(message, KeysRead):
            return
        server = peer.member.rank
        with self._changed:
            others = {shard: one for shard, one in self._leaders.items() if one != server}
            self._leaders = others | dict.fromkeys(message.led, server)  # a new one: a read may go through the former
            if message.ticket == self._ticket:
                self._answers[server] = RowsAnswer(message, bytes(payload) if payload is not None else b"")
            self._changed.notify_all()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Forget what a server led; it is dialled again."""
        with self._changed:
            server = peer.member.rank
            self._leaders = {shard: one for shard, one in self._leaders.items() if one != server}
            self._changed.notify_all()


class LiveStore:
    """A store of the job, for reading; `GroupReader.store` returns it.

    Args:
        rows: reads rows.
        name: of the store.
    """

    def __init__(self, rows: LiveRows, name: str) -> None:
        self._rows, self.name = rows, name

    def pull(self, keys: int | str | Sequence[int] | torch.Tensor | Array) -> torch.Tensor:
        """Return the row of each key, as it is now on the servers; of an absent key its start value.

        Args:
            keys: one integer, or several in a list, tensor or array; or the name of a tensor that was pushed by name.

        Returns:
            A new tensor of shape (n, *row shape), in the order of the keys; for a single key its row, for a name its
            tensor.

        Raises:
            UsageError: the store or the name does not exist, or the keys are no integers of 64 bits.
        """
        wanted = given.checked_key(keys)
        if isinstance(wanted, str):
            spec, rows = self._rows.read(self.name, wanted, np.empty(0, dtype=np.int64))
            return _values(spec, rows).reshape(-1)[: spec.elements].reshape(spec.shape)
        listed = given.integer_keys([wanted] if isinstance(wanted, int) else np.asarray(wanted, dtype=np.int64))
        unique, inverse = np.unique(listed, return_inverse=True)
        spec, rows = self._rows.read(self.name, "", unique)
        found = _values(spec, rows)[torch.from_numpy(inverse.reshape(-1))].reshape(-1, *spec.shape)
        return found[0] if isinstance(wanted, int) else found


def _values(spec: TableSpec, rows: Array) -> torch.Tensor:
    """Return rows of bytes as a tensor of shape (rows, elements)."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not len(rows):
        return torch.empty((0, spec.width), dtype=dtype)
    return torch.from_numpy(rows.reshape(-1)).view(dtype).reshape(len(rows), spec.width)
