"""Tables in a checkpoint: by the store's name and ranges of hash values, so that any number of servers can take them.

    store/STORE/LO-HI/about                        JSON: what the store and its tables are, clocks, what waits for one
    store/STORE/LO-HI/integers/{keys,rows,beside,state,uses}  the rows of integer keys
    store/STORE/LO-HI/integers/sketch                    counts of keys without a row
    store/STORE/LO-HI/named/KEY/{keys,rows,beside,state} the blocks of a named key's tensor

LO and HI bound hash values of SHARD_BITS bits, in hexadecimal. `beside` are the extra integers that some
reductions have with a row, `state` is that of the table's optimizer, `uses` are the last uses of rows that may leave.
Names are quoted as in a URL. A server that restores takes its own keys from every range that overlaps its own range.

A server's part of a checkpoint of tables: each shard that it leads, as it was when all had marked the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from psctl.errors import CheckpointCorrupt
from psctl.ps.outputs import SaveSlices
from psctl.ps.pieces import bytes_view
from psctl.ps.snapshot import CopiedSlice, dtype_name
from psctl.ps.table_messages import StoreSpec, TableSpec
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.retention import Sketch
from psctl.ps.tables.row_index import SHARD_BITS, Keys, shard_of
from psctl.ps.tables.server.table_shard import HostedShard, ReplicatedTables, led_shards
from psctl.ps.tables.table_bytes import decode_entry, staged_entries
from psctl.ps.tables.table_state import FOREVER, EntryPart, ShardTable, TableEntry, TableShard
from psctl.types import UNDECODABLE, Range, TensorSlice

ROOT = "store/"
"""What the names of all tensors of tables begin with."""


class SavedTable(msgspec.Struct, frozen=True):
    """The state of one shard of a table that is not tensors: the optimizer's settings, and counts."""

    settings: dict[str, float]
    changes: int
    counts: dict[str, int]
    counted: int


class SavedStore(msgspec.Struct, frozen=True):
    """The state of one shard of a store that is not tensors."""

    store: StoreSpec
    tables: list[TableSpec]
    clocks: dict[int, int]
    staged: list[bytes]
    states: dict[str, SavedTable] = {}
    """By table."""


_ENCODER = msgspec.json.Encoder()
_ABOUT = msgspec.json.Decoder(SavedStore)


def hashes(shard: int, shards: int) -> Range:
    """Return the hash values of a shard: those h with h * shards >> SHARD_BITS == shard."""
    return Range(-(-(shard << SHARD_BITS) // shards), -(-((shard + 1) << SHARD_BITS) // shards))


def copy_shard(held: TableShard, shard: int, shards: int) -> list[CopiedSlice]:
    """Copy a shard of a store as it is now."""
    where = hashes(shard, shards)
    place = f"{ROOT}{quote(held.spec.name, safe='')}/{where.start:08x}-{where.stop:08x}"
    tables = held.tables
    states = {
        name: SavedTable(table.settings, table.changes, table.counts, table.sketch.counted)
        for name, table in tables.items()
    }
    about = SavedStore(
        held.spec, [table.kind.spec for table in tables.values()], held.clocks, staged_entries(held), states
    )
    found = [_copied(f"{place}/about", torch.frombuffer(bytearray(_ENCODER.encode(about)), dtype=torch.uint8))]
    for name, table in held.tables.items():
        within = f"{place}/named/{quote(name, safe='')}" if name else f"{place}/integers"
        lanes = table.rows.lanes.at(slice(0, len(table.rows)))
        found.append(_copied(f"{within}/keys", torch.from_numpy(table.rows.keys.copy())))
        found.append(_copied(f"{within}/rows", lanes.values.clone()))
        if lanes.extra is not None:
            found.append(_copied(f"{within}/beside", lanes.extra.clone()))
        if table.rows.state is not None:
            found.append(_copied(f"{within}/state", table.rows.state[: len(table.rows)].clone()))
        if table.kind.removes:
            found.append(_copied(f"{within}/uses", torch.from_numpy(table.uses[: len(table.rows)].copy())))
        if table.sketch.cells.size:
            found.append(_copied(f"{within}/sketch", torch.from_numpy(table.sketch.cells.copy())))
    return found


def _copied(name: str, tensor: torch.Tensor) -> CopiedSlice:
    where = TensorSlice(name, dtype_name(tensor), tuple(tensor.shape), 0, tensor.numel())
    return CopiedSlice(where, bytes_view(tensor.reshape(-1)) if tensor.numel() else memoryview(b""))


def wanted(saved: Iterable[TensorSlice], shard: int, shards: int) -> list[TensorSlice]:
    """Return the tensors of a checkpoint of which a shard needs something."""
    own = hashes(shard, shards)
    return [each for each in saved if each.name.startswith(ROOT) and len(_range(each.name).meet(own))]


def _range(name: str) -> Range:
    try:
        low, high = name.split("/")[2].split("-")
        return Range(int(low, 16), int(high, 16))
    except (IndexError, ValueError):
        raise CheckpointCorrupt(f"{name} is no tensor of a store") from None


def decode_about(data: bytes, name: str) -> SavedStore:
    """Return what a saved range says about its store.

    Raises:
        CheckpointCorrupt: the bytes are not such a description.
    """
    try:
        return _ABOUT.decode(data)
    except UNDECODABLE as error:
        raise CheckpointCorrupt(f"{name}: {error}") from error


def load(tensors: Mapping[str, torch.Tensor], shard: int, shards: int, machine: ReplicatedTables) -> list[TableShard]:
    """Return a shard of all stores, made from the tensors that `wanted` named.

    Args:
        tensors: by name, in their shapes.
        shard, shards: which one, of how many there are now.
        machine: makes empty ones.

    Raises:
        CheckpointCorrupt: the checkpoint's description of a store contradicts itself.
    """
    found: dict[str, TableShard] = {}
    for name in sorted(each for each in tensors if each.endswith("/about") and each.count("/") == 3):
        about = decode_about(bytes(tensors[name].numpy()), name)
        first = about.store.name not in found
        held = found.setdefault(about.store.name, machine.make_shard(about.store))
        held.restored = True
        _join(held, about, tensors, name.removesuffix("about"), (shard, shards), first=first)
    return list(found.values())


def _join(
    held: TableShard, about: SavedStore, tensors: Mapping[str, torch.Tensor], place: str, own: tuple[int, int],
    *, first: bool,
) -> None:  # fmt: skip
    """Add to a shard its own part of one saved range."""
    held.clocks = about.clocks if first else {worker: min(at, held.clocks.get(worker, at))
                                              for worker, at in about.clocks.items()}  # fmt: skip
    for spec in about.tables:
        within = f"{place}named/{quote(spec.name, safe='')}" if spec.name else f"{place}integers"
        table = held.table(spec)
        keys, extra = tensors[f"{within}/keys"].numpy(), tensors.get(f"{within}/beside")
        mine = torch.from_numpy(_mine(spec.name, keys, own))
        if mine.any():
            lanes, state = Lanes(tensors[f"{within}/rows"], extra).at(mine), tensors.get(f"{within}/state")
            uses = tensors.get(f"{within}/uses")
            table.set_absent(
                keys[mine.numpy()], lanes,
                None if state is None else state[mine], None if uses is None else uses[mine].numpy(),
            )  # fmt: skip
        if spec.name in about.states:
            _restore(table, about.states[spec.name], tensors.get(f"{within}/sketch"), counts=_begins_in(place, own))
    for data in about.staged:
        entry = decode_entry(data, held.kind)
        parts = [part for each in entry.parts if (part := _part(each, own, first=first)) is not None]
        if parts:
            held.stage(TableEntry(entry.worker, -1, entry.clock, parts))  # numbers begin anew


def _restore(table: ShardTable, saved: SavedTable, sketch: torch.Tensor | None, *, counts: bool) -> None:
    """Set the settings, and add the counts of one saved range: those of keys, and (once) those of entries."""
    table.settings |= saved.settings
    table.changes = max(table.changes, saved.changes)
    if sketch is not None and table.sketch.cells.size:
        table.sketch.merge(Sketch(sketch.numpy(), saved.counted))
    for name, count in saved.counts.items() if counts else ():
        table.counts[name] += count


def _begins_in(place: str, own: tuple[int, int]) -> bool:
    """Return whether a saved range begins in a shard: so in exactly one."""
    return hashes(*own).start <= _range(place).start < hashes(*own).stop


def _mine(table: str, keys: Keys, own: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = shard_of(table, keys, own[1]) == own[0]
    return found


def _part(part: EntryPart, own: tuple[int, int], *, first: bool) -> EntryPart | None:
    """Return a shard's own share of a part that waits for its clock; a call of all rows is kept once."""
    if part.keys is None:
        return part if first else None
    mine = _mine(part.table, part.keys, own)
    if not mine.any():
        return None
    lanes = None if part.lanes is None else part.lanes.at(torch.from_numpy(mine))
    return msgspec.structs.replace(part, keys=part.keys[mine], lanes=lanes)


KEPT = 2
"""Checkpoints kept until they are requested."""


class TableCheckpoints:
    """Copies that were taken.

    Args:
        hosted: the server's shards.
        shards: how many each store has.
    """

    def __init__(self, hosted: Mapping[int, HostedShard], shards: int) -> None:
        self.wanted: int | None = None
        """The step of the checkpoint that this server is to send its part of."""
        self._hosted, self._shards = hosted, shards
        self._cuts: dict[int, dict[tuple[str, int], list[CopiedSlice]]] = {}  # step -> (store, shard) -> as it was then

    def add_copy(self, store: TableShard, shard: int) -> None:
        """Copy a shard in which all workers have marked a step."""
        self._cuts.setdefault(store.cut, {})[store.spec.name, shard] = copy_shard(store, shard, self._shards)
        for old in sorted(self._cuts)[:-KEPT]:
            del self._cuts[old]

    def forget(self, shard: int) -> None:
        """Forget the copies of a shard that another server leads."""
        for cut in self._cuts.values():
            for key in [key for key in cut if key[1] == shard]:
                del cut[key]

    def take_part(self) -> SaveSlices | None:
        """Return this server's part of the checkpoint that is wanted, once, when it is there."""
        if self.wanted is None:
            return None
        copied: list[CopiedSlice] = []
        for hosted in led_shards(self._hosted):
            for name, store in hosted.state.stores.items():
                held = self._cuts.get(self.wanted, {}).get((name, hosted.shard))
                if held is not None:
                    copied += held
                elif store.cut < self.wanted:
                    return None
                elif store.cut == FOREVER:  # all have left it: it does not change any more
                    copied += copy_shard(store, hosted.shard, self._shards)
        step, self.wanted = self.wanted, None
        for old in [old for old in self._cuts if old <= step]:
            del self._cuts[old]
        return SaveSlices(step, copied)
