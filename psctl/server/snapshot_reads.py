"""Reads of tables by readers outside the job, such as `psctl` commands.

A reader has no session and no clock: it waits for no worker, no worker waits for it, and it changes nothing. Its answer
is queued like others (read_answers.py), so it never observes an update that could still be lost. One row is read at one
moment, several rows perhaps at several. Like the state machine that it reads, this module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from psctl.job.table_server_messages import ReadRow, ReadRows, ReadTable, ReadWanted
from psctl.ps.messages import PART
from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import TableSpec, TableStats
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import shard_of
from psctl.ps.tables.server.read_answers import READERS
from psctl.ps.tables.server.table_server import TableOutput, TableServer
from psctl.ps.tables.server.table_shard import HostedShard, led_shards
from psctl.ps.tables.table_packing import bytes_of
from psctl.ps.tables.table_state import ShardTable

AT_ONCE = 8
"""Most answers that wait for replicas at once; further readers must try again later."""

NAMES = 1000
"""Most tables in the answer to a reader that names no key."""

_SENT = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64
"""Types that are sent unchanged to a reader, which has no torch."""


class SnapshotReads:
    """Answers the readers of one server's tables.

    Args:
        state: the server's tables.
    """

    def __init__(self, state: TableServer) -> None:
        self._state = state

    def on_read(self, wanted: ReadWanted) -> list[TableOutput]:
        """Queue the answer until all replicas have the versions that it depends on; return what may be sent now."""
        state, led = self._state, led_shards(self._state.shards_here)
        stores = sorted({name for hosted in led for name in hosted.state.stores})
        shards = [hosted.shard for hosted in led]
        answer = ReadRows(wanted.ticket, wanted.host, state.epoch, state.shard_count, shards, stores, [], [])
        arrays: list[Array] = []
        if len(state.held_answers.queued(READERS)) >= AT_ONCE:
            answer, led = replace(answer, problem="busy"), []
        elif wanted.store in stores:
            answer, arrays = self._add_rows(answer, wanted, led)
        payload = np.concatenate(arrays).data if arrays else None
        versions = {hosted.shard: hosted.version for hosted in led}
        state.held_answers.add(ToWorker(READERS, answer, payload), versions, lambda shards: self._on_lead_lost(answer))
        return state.release_outputs()

    def _on_lead_lost(self, answer: ReadRows) -> None:
        """Answer "busy" when another server leads a shard of the answer now: the reader asks again."""
        again = replace(answer, problem="busy", led=[], tables=[], rows=[])
        self._state.held_answers.add(ToWorker(READERS, again), {})

    def _add_rows(
        self, answer: ReadRows, wanted: ReadWanted, led: Sequence[HostedShard]
    ) -> tuple[ReadRows, list[Array]]:
        """Return the answer with its tables and rows, and the rows' bytes; without rows if they exceed one answer."""
        tables = [hosted.state.stores[wanted.store].tables for hosted in led if wanted.store in hosted.state.stores]
        kinds = {name: table.kind for held in tables for name, table in held.items()}
        names = [*wanted.names, *([""] if wanted.keys else [])]
        listed = [kinds[name].spec for name in (names or sorted(kinds)[:NAMES]) if name in kinds]
        found = [_described(spec, [held[spec.name] for held in tables if spec.name in held]) for spec in listed]
        rows: list[ReadRow] = []
        arrays: list[Array] = []
        size = 0
        for name in [name for name in names if name in kinds]:
            kind = kinds[name]
            sent = _sent_dtype(kind.dtype)
            keys = np.arange(kind.spec.blocks) if name else np.array(wanted.keys, dtype=np.int64)
            shards = shard_of(name, keys, self._state.shard_count)
            for hosted in led:
                table = hosted.table(wanted.store, name)
                own = keys[shards == hosted.shard]
                own = own[:0] if table is None else own[table.rows.find(own) >= 0]
                size += len(own) * kind.spec.width * sent.itemsize
                if size > PART:
                    return replace(answer, tables=found, problem="large"), []
                if table is not None and len(own):
                    present, lanes = table.read(own)
                    values = kind.as_read(lanes, present, own).values
                    rows.append(ReadRow(name, own.tolist(), kind.spec.width, str(sent).removeprefix("torch.")))
                    arrays.append(bytes_of(values.to(sent)))
        return replace(answer, tables=found, rows=rows), arrays


def _described(spec: TableSpec, held: Sequence[ShardTable]) -> ReadTable:
    """Return a table's description with the sums of its counts on this server."""
    stats = [table.stats for table in held]
    total = {name: sum(getattr(each, name) for each in stats) for name in TableStats.__struct_fields__}
    optimizer = "" if spec.optimizer is None else spec.optimizer.name
    return ReadTable(spec.name, spec.shape, spec.dtype, spec.reduce, optimizer, total)


def _sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are sent."""
    if dtype in _SENT:
        return dtype
    if dtype is torch.bool:
        return torch.uint8
    return torch.float32 if dtype.is_floating_point else torch.int64
