"""Reads of tables by readers outside the job, such as `psctl` commands.

A reader has no session and no clock: it waits for no worker, no worker waits for it, and it changes nothing. Its answer
is queued like others (read_answers.py), so it never observes an update that could still be lost. One row is read at one
moment, several rows perhaps at several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from psctl.ps.messages import PART
from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import Keys, shard_of
from psctl.ps.tables.server.read_answers import READERS, HeldAnswers
from psctl.ps.tables.server.table_shard import HostedShard
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import bytes_of

AT_ONCE = 8
"""Most answers that wait for replicas at once; further readers must try again later."""

NAMES = 1000
"""Most tables in the answer to a reader that names no key."""

_PLAIN = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64
"""Types that are sent unchanged to a reader, which has no torch."""


class SnapshotRead(msgspec.Struct, frozen=True):
    """A reader's request: named keys and integer keys of a store; without keys: the list of tables.

    `who` is returned with the answer.
    """

    who: Any
    store: str
    names: Sequence[str]
    keys: Sequence[int]


class SnapshotRows(msgspec.Struct, frozen=True):
    """Existing rows of one table: of integer keys, or (named) blocks of the tensor. Their bytes are in the answer's
    payload, one table after another."""

    table: str
    keys: list[int]
    width: int
    sent: str  # the type in which the values travel


class SnapshotAnswer(msgspec.Struct, frozen=True):
    """The answer, of the shards `led` out of `shards`, as assignment `epoch` has them.

    `problem`: busy; large: more than one answer holds.
    """

    look: SnapshotRead
    epoch: int
    shards: int
    led: list[int]
    stores: list[str]
    tables: list[TableSpec]
    rows: list[SnapshotRows]
    problem: str = ""


class SnapshotReads:
    """Answers readers.

    Args:
        outbox: queues the answers.
        slots: the server's shards.
        shards: how many each store has.
    """

    def __init__(self, outbox: HeldAnswers, slots: Mapping[int, HostedShard], shards: int) -> None:
        self._outbox, self._slots, self._shards = outbox, slots, shards

    def on_read(self, look: SnapshotRead, epoch: int) -> None:
        """Answer as soon as all replicas have the versions that the answer depends on."""
        led = [slot for _, slot in sorted(self._slots.items()) if slot.leads]
        stores = sorted({name for slot in led for name in slot.state.stores})
        seen = SnapshotAnswer(look, epoch, self._shards, [slot.shard for slot in led], stores, [], [])
        arrays: list[Array] = []
        if self._outbox.count_waiting(READERS) >= AT_ONCE:
            seen = msgspec.structs.replace(seen, problem="busy")
            led = []
        elif look.store in stores:
            kinds = _kinds(look.store, led)
            seen, arrays = self._rows(seen, kinds, led)
        payload = np.concatenate(arrays).data if arrays else None
        versions = {slot.shard: slot.version for slot in led}
        self._outbox.add(ToWorker(READERS, seen, payload), versions, lambda shards: self._on_lead_lost(seen))

    def _on_lead_lost(self, seen: SnapshotAnswer) -> None:
        """Answer "busy" when another server leads a shard of the answer now: the reader asks again."""
        again = msgspec.structs.replace(seen, problem="busy", led=[], tables=[], rows=[])
        self._outbox.add(ToWorker(READERS, again), {})

    def _rows(
        self, seen: SnapshotAnswer, kinds: Mapping[str, TableKind], led: Sequence[HostedShard]
    ) -> tuple[SnapshotAnswer, list[Array]]:
        look = seen.look
        asked = [*look.names, *([""] if look.keys else [])]
        specs = [kinds[name].spec for name in (asked or sorted(kinds)[:NAMES]) if name in kinds]
        rows: list[SnapshotRows] = []
        arrays: list[Array] = []
        seen = msgspec.structs.replace(seen, tables=specs, rows=rows)
        size = 0
        for name in [name for name in asked if name in kinds]:
            kind = kinds[name]
            plain = _plain(kind.dtype)
            keys = np.arange(kind.spec.blocks) if name else np.array(look.keys, dtype=np.int64)
            shards = shard_of(name, keys, self._shards)
            for slot in led:
                own = _there(slot, look.store, name, keys[shards == slot.shard])
                size += len(own) * kind.spec.width * plain.itemsize
                if size > PART:
                    return msgspec.structs.replace(seen, problem="large", rows=[]), []
                if len(own):
                    there, lanes = slot.state.stores[look.store].tables[name].read(own)
                    values = kind.finished(lanes, there, own).values
                    rows.append(SnapshotRows(name, own.tolist(), kind.spec.width, str(plain).removeprefix("torch.")))
                    arrays.append(bytes_of(values.to(plain)))
        return seen, arrays


def _plain(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` travel."""
    if dtype in _PLAIN:
        return dtype
    if dtype is torch.bool:
        return torch.uint8
    return torch.float32 if dtype.is_floating_point else torch.int64


def _kinds(store: str, led: Sequence[HostedShard]) -> dict[str, TableKind]:
    """Return the tables that there are in these shards."""
    found = [slot.state.stores[store] for slot in led if store in slot.state.stores]
    return {name: table.kind for shard in found for name, table in shard.tables.items()}


def _there(slot: HostedShard, store: str, table: str, keys: Keys) -> Keys:
    """Return those of the keys that a shard has a row of."""
    held = slot.state.stores.get(store)
    if held is None or table not in held.tables:
        return keys[:0]
    return keys[held.tables[table].rows.find(keys) >= 0]
