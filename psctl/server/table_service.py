"""A server's tables between its coordinator and its desk: when they listen, what is loaded and saved, who is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psctl.client.shared_buffers import SharedRows
from psctl.errors import ConnectionFailed
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted
from psctl.job.membership_messages import CountUntil, Members, ProtocolViolation, ServerUnreachable, WorkerGone
from psctl.job.table_server_messages import (
    ReadRow,
    ReadRows,
    ReadTable,
    ReadWanted,
    ServeTables,
    TablesAssigned,
    TablesCaughtUp,
    TablesHandedOver,
    TablesReady,
    TablesSave,
)
from psctl.ps.outputs import CaughtUp, HandedOver, Load, Save
from psctl.ps.pieces import bytes_view
from psctl.ps.tables.server.held_answers import Send
from psctl.ps.tables.server.saved_tables import flat, wanted
from psctl.ps.tables.server.snapshot_reads import Look, Seen
from psctl.ps.tables.table_state import FOREVER, last_of
from psctl.server.table_connections import Report, TableDesk
from psctl.train_state.data_position import place_of
from psctl.types import Address, Member, ServerAt, TensorSlice

FIRST_TICKET = 1
"""Of what is loaded; below it are the parameters."""


class TablePart:
    """See the module. What comes from the coordinator comes on one thread.

    Args:
        me: this server.
        listen: has the desk listen, and returns where.
        dial: connects to another server's tables.
        save: takes this server's part of a checkpoint; must not block.
        memory: what workers of this host read, and theirs; None: all bytes are sent.
        folder: the job's code on this host.
    """

    def __init__(
        self, me: Member, listen: Callable[[TableDesk], Address], dial: Callable[[Member, Any, Any], Any],
        save: Callable[[Save], Any], memory: SharedRows | None = None, folder: str = "",
    ) -> None:  # fmt: skip
        self.desk = TableDesk(me.rank, self._report, dial, self._unreachable, memory, folder)
        self._listen, self._save = listen, save
        self._tell: Callable[..., Any] = lambda *message: None
        self._saved: list[TensorSlice] = []
        self._shards = 0
        self._loading: dict[int, list[tuple[TensorSlice, torch.Tensor]]] = {}  # by ticket
        self._world: set[int] = set()
        self._last: dict[int, int] = {}  # by rank that died: the last sequence that counts
        self._gone: dict[int, int] = {}  # of those whose place nobody takes

    def speak(self, tell: Callable[..., Any], world: int) -> None:
        """Say how the coordinator is told something, and how many workers there are."""
        self._tell, self._world = tell, set(range(world))

    def heard(self, message: Any) -> bool:
        """Take in what the coordinator says; False when it is not about tables alone."""
        match message:
            case ServeTables():
                self._tell(TablesReady(self._listen(self.desk)))
            case TablesAssigned():
                self._shards = len(message.assignment.chains)
                self._saved = self._saved or message.saved
                self.desk.assigned(message)
                if self._gone:  # who comes late heard of them before
                    self.desk.leave(self._gone)
            case TablesSave():
                self.desk.save(message.step)
            case ReadWanted():
                self.desk.look(Look((message.ticket, message.host), message.store, message.names, message.keys))
            case LoadEnd() if message.ticket >= FIRST_TICKET:
                self._loaded(message)
            case WorkerGone():
                self.desk.gone(message.rank, message.incarnation)
                return False
            case CountUntil():
                self._last[message.rank] = last_of(place_of(message.clock + 1, inside=False))
                return False
            case Members():
                self._gone = {rank: self._last.get(rank, FOREVER) for rank in self._world - set(message.ranks)}
                self.desk.leave(self._gone)
                return False
            case _:
                return False
        return True

    def place(self, message: LoadPart, size: int) -> memoryview | None:
        """Return where loaded bytes go."""
        loading = self._loading.get(message.ticket, [])
        if not 0 <= message.index < len(loading):
            return None
        whole = bytes_view(loading[message.index][1])
        if message.offset < 0 or message.offset + size > len(whole):
            return None
        return whole[message.offset : message.offset + size]

    def _loaded(self, message: LoadEnd) -> None:
        loading = self._loading.pop(message.ticket)
        if message.problem:
            raise ConnectionFailed(f"the tables of the checkpoint could not be read: {message.problem}")
        tensors = {each.name: tensor.reshape(each.shape) for each, tensor in loading}
        self.desk.loaded(message.ticket - FIRST_TICKET, tensors)

    def _report(self, what: Report) -> None:
        match what:
            case ProtocolViolation():
                self._tell(what)
            case CaughtUp():
                self._tell(TablesCaughtUp(what.epoch, what.shard, what.server))
            case HandedOver():
                self._tell(TablesHandedOver(what.epoch, what.shard))
            case Save():
                self._save(what)
            case Send():
                self._tell(read_rows(what.message), what.payload)
            case Load():
                slices = wanted(self._saved, what.shard, self._shards)
                self._loading[what.shard + FIRST_TICKET] = list(zip(slices, flat(slices), strict=True))
                self._tell(LoadWanted(what.shard + FIRST_TICKET, slices))

    def _unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        self._tell(ServerUnreachable(at.rank, at.incarnation, error.message))


def read_rows(seen: Seen) -> ReadRows:
    """Return what a reader is told of what was seen."""
    ticket, host = seen.look.who
    tables = [ReadTable(spec.name, spec.shape, spec.dtype, spec.reduce) for spec in seen.tables]
    rows = [ReadRow(row.table, row.keys, row.width, row.sent) for row in seen.rows]
    return ReadRows(ticket, host, seen.epoch, seen.shards, seen.led, seen.stores, tables, rows, seen.problem)
