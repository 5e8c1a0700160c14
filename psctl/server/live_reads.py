"""Reads of tables by the job's readers (`groups:`).

Like readers outside the job (snapshot_reads.py) a reader has no session and no clock, waits for no worker and changes
nothing. Its answer is queued like others, so it never observes an update that could still be lost. One row is read at
one moment. This module does no I/O.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from psctl.errors import MessageRefused
from psctl.ps.outputs import ToReader, ToWorker
from psctl.ps.table_messages import KeysRead, ReadKeys
from psctl.ps.tables.row_index import Keys, shard_of
from psctl.ps.tables.server.read_answers import LARGEST_ANSWER, READERS
from psctl.ps.tables.server.table_server import TableOutput, TableServer
from psctl.ps.tables.server.table_shard import led_shards
from psctl.ps.tables.table_packing import bytes_of

AT_ONCE = 8
"""Most answers to one reader that wait for replicas."""


def queue_of(reader: int) -> int:
    """Return the number of the queue of a reader's answers, which no worker's rank is; and back."""
    return READERS - 1 - reader


class LiveReads:
    """Answers the job's readers from one server's tables.

    Args:
        state: the server's tables.
    """

    def __init__(self, state: TableServer) -> None:
        self._state = state

    def on_read(self, reader: int, wanted: ReadKeys, payload: memoryview) -> list[TableOutput]:
        """Queue the answer until all replicas have the versions that it depends on; return what may be sent now.

        Raises:
            MessageRefused: the payload is no list of keys; the reader's fault.
        """
        if len(payload) % 8 or (wanted.table and len(payload)):
            raise MessageRefused(f"ReadKeys: a payload of {len(payload)} bytes", where=f"reader/{reader}")
        state, led = self._state, led_shards(self._state.shards_here)
        stores = sorted({name for hosted in led for name in hosted.state.stores})
        answer = KeysRead(wanted.ticket, state.epoch, state.shard_count, [hosted.shard for hosted in led], stores)
        data: memoryview | None = None
        if len(state.held_answers.queued(queue_of(reader))) >= AT_ONCE:
            answer, led = replace(answer, problem="busy"), []
        else:
            answer, data = self._rows(answer, wanted, np.frombuffer(payload, dtype=np.int64))
        versions = {hosted.shard: hosted.version for hosted in led}
        state.held_answers.add(
            ToWorker(queue_of(reader), answer, data), versions, lambda shards: self._on_lead_lost(reader, answer)
        )
        return state.release_outputs()

    def _on_lead_lost(self, reader: int, answer: KeysRead) -> None:
        """Answer "busy" when another server leads a shard of the answer now: the reader asks again."""
        again = replace(answer, problem="busy", led=[], spec=None)
        self._state.held_answers.add(ToWorker(queue_of(reader), again), {})

    def _rows(self, answer: KeysRead, wanted: ReadKeys, keys: Keys) -> tuple[KeysRead, memoryview | None]:
        """Return the answer with the table's description, and the rows of the keys of shards that are led here."""
        shards = self._state.shards_here
        held = {led: shards[led].table(wanted.store, wanted.table) for led in answer.led}
        kind = next((table.kind for table in held.values() if table is not None), None)
        if kind is None:
            return answer, None
        if wanted.table:
            keys = np.arange(kind.spec.blocks)
        of = shard_of(wanted.table, keys, answer.shards)
        own = np.isin(of, answer.led)
        keys, of = keys[own], of[own]
        size = len(keys) * kind.spec.width * kind.dtype.itemsize
        answer = replace(answer, spec=kind.spec)
        if size > LARGEST_ANSWER:
            return replace(answer, problem="large"), None
        rows = np.empty((len(keys), kind.spec.width * kind.dtype.itemsize), dtype=np.uint8)
        for led, table in held.items():
            at = np.flatnonzero(of == led)
            if len(at):
                values = table.read_values(keys[at]) if table is not None else kind.initial_rows(keys[at]).values
                rows[at] = bytes_of(values.contiguous()).reshape(len(at), -1)
        return answer, rows.reshape(-1).data


def as_sent(output: ToWorker) -> ToReader:
    """Return the message of a queue of a reader's answers, to that reader."""
    return ToReader(queue_of(output.rank), output.message, output.payload)
