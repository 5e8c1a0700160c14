"""Tables in a checkpoint: by the store's name and ranges of hash values, so that any number of servers can take them.

    store/STORE/LO-HI/about                        JSON: what the store and its tables are, clocks, what waits for one
    store/STORE/LO-HI/integers/{keys,rows,beside,state,uses}  the rows of integer keys
    store/STORE/LO-HI/integers/sketch                    counts of keys without a row
    store/STORE/LO-HI/named/KEY/{keys,rows,beside,state} the blocks of a named key's tensor

LO and HI bound hash values (saved_names.py). `beside` are the extra integers that some
reductions have with a row, `state` is that of the table's optimizer, `uses` are the last uses of rows that may leave.
Names are quoted as in a URL. A server that restores takes its own keys from every range that overlaps its own range.

    store/STORE/LO-HI+STEP/...     the same tensors, with the rows that have changed since the part before

After the part with all rows follow those of the changes, by step. Each has the tables' state that is not rows, and
`removed`, the keys of rows that were removed; a table that `about` names as `whole` has all its rows in that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from psctl.errors import CheckpointCorrupt
from psctl.ps.pieces import bytes_view
from psctl.ps.snapshot import CopiedSlice, dtype_name
from psctl.ps.table_messages import StoreSpec, TableSpec
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.retention import Sketch
from psctl.ps.tables.row_changes import RowSet, newest_rows
from psctl.ps.tables.row_index import NO_KEYS, SHARD_BITS, Keys, shard_of
from psctl.ps.tables.server.saved_names import ROOT, WHOLE, SavedPlace, find_parts, read_name
from psctl.ps.tables.server.table_shard import ReplicatedTables
from psctl.ps.tables.table_bytes import decode_entry, staged_entries
from psctl.ps.tables.table_state import EntryPart, ShardTable, TableCut, TableEntry, TableShard
from psctl.types import UNDECODABLE, Range, TensorSlice


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
    whole: list[str] = []
    """In a part with changes: the tables of which it has all rows."""


_ENCODER = msgspec.json.Encoder()
_ABOUT = msgspec.json.Decoder(SavedStore)


def hashes(shard: int, shards: int) -> Range:
    """Return the hash values of a shard: those h with h * shards >> SHARD_BITS == shard."""
    return Range(-(-(shard << SHARD_BITS) // shards), -(-((shard + 1) << SHARD_BITS) // shards))


def copy_shard(held: TableShard, shard: int, shards: int) -> list[CopiedSlice]:
    """Copy a shard of a store as it is now."""
    return _copies(held, SavedPlace(quote(held.spec.name, safe=""), hashes(shard, shards)), None)


def copy_changes(
    held: TableShard, shard: int, shards: int, step: int, cuts: Mapping[str, TableCut]
) -> list[CopiedSlice]:
    """Copy what has changed in a shard of a store.

    Args:
        held, shard, shards: the shard.
        step: of the checkpoint that the copy is for.
        cuts: by table, since when; a table without one has all rows in the copy.
    """
    return _copies(held, SavedPlace(quote(held.spec.name, safe=""), hashes(shard, shards), step), cuts)


def _copies(held: TableShard, place: SavedPlace, cuts: Mapping[str, TableCut] | None) -> list[CopiedSlice]:
    tables = held.tables
    states = {
        name: SavedTable(table.settings, table.changes, table.counts, table.sketch.counted)
        for name, table in tables.items()
    }
    known = {} if cuts is None else {name: cut for name, cut in cuts.items() if cut.is_known(tables[name])}
    about = SavedStore(
        held.spec, [table.kind.spec for table in tables.values()], held.clocks, staged_entries(held), states,
        [] if cuts is None else [name for name in tables if name not in known],
    )  # fmt: skip
    found = [_copied(f"{place.prefix}about", torch.frombuffer(bytearray(_ENCODER.encode(about)), dtype=torch.uint8))]
    for name, table in tables.items():
        found += _copied_table(table, place.prefix + _inside(name), known.get(name))
    return found


def _inside(table: str) -> str:
    return f"named/{quote(table, safe='')}" if table else "integers"


def _copied_table(table: ShardTable, within: str, cut: TableCut | None) -> list[CopiedSlice]:
    """Copy the rows that have changed since a cut, None: all rows; and what the table has beside rows."""
    found, rows, at = [], table.rows, slice(0, len(table.rows))
    changed: Keys | slice = at
    count = len(rows)
    if cut is not None:
        changed, removed = cut.changes.changed_since(cut.number, count), cut.changes.removed_since(cut.number)
        count = len(changed)
        if len(removed):
            found.append(_copied(f"{within}/removed", torch.from_numpy(removed)))
    if cut is None or count:
        picked = changed if isinstance(changed, slice) else torch.from_numpy(changed)
        found.append(_copied(f"{within}/keys", torch.from_numpy(rows.keys[changed].copy())))
        lanes = rows.lanes.at(at)
        found.append(_copied(f"{within}/rows", lanes.values[picked].clone()))
        if lanes.extra is not None:
            found.append(_copied(f"{within}/beside", lanes.extra[picked].clone()))
        if rows.state is not None:
            found.append(_copied(f"{within}/state", rows.state[at][picked].clone()))
        if table.kind.removes:
            found.append(_copied(f"{within}/uses", torch.from_numpy(table.uses[at][changed].copy())))
    if table.sketch.cells.size:
        found.append(_copied(f"{within}/sketch", torch.from_numpy(table.sketch.cells.copy())))
    return found


def _copied(name: str, tensor: torch.Tensor) -> CopiedSlice:
    where = TensorSlice(name, dtype_name(tensor), tuple(tensor.shape), 0, tensor.numel())
    return CopiedSlice(where, bytes_view(tensor.reshape(-1)) if tensor.numel() else memoryview(b""))


def wanted(saved: Iterable[TensorSlice], shard: int, shards: int) -> list[TensorSlice]:
    """Return the tensors of a checkpoint of which a shard needs something."""
    own = hashes(shard, shards)
    return [each for each in saved if each.name.startswith(ROOT) and len(read_name(each.name).hashes.meet(own))]


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
    for _, chain in groupby(find_parts(tensors), key=lambda part: (part.store, part.hashes)):
        parts = list(chain)
        abouts = [decode_about(bytes(tensors[f"{part.prefix}about"].numpy()), f"{part.prefix}about") for part in parts]
        store = abouts[-1].store
        first = store.name not in found
        held = found.setdefault(store.name, machine.make_shard(store))
        held.restored = True
        _join(held, list(zip(parts, abouts, strict=True)), tensors, (shard, shards), first=first)
    return list(found.values())


def _join(
    held: TableShard, parts: Sequence[tuple[SavedPlace, SavedStore]], tensors: Mapping[str, torch.Tensor],
    own: tuple[int, int], *, first: bool,
) -> None:  # fmt: skip
    """Add to a shard its own part of one saved range; the newest part has the state that is not rows."""
    place, about = parts[-1]
    held.clocks = about.clocks if first else {worker: min(at, held.clocks.get(worker, at))
                                              for worker, at in about.clocks.items()}  # fmt: skip
    for spec in about.tables:
        table = held.table(spec)
        changes = table.changes
        _add_rows(table, parts, tensors, own)
        if spec.name in about.states:
            table.changes = changes  # those that the run has counted, whatever number of parts they come in
            sketch = tensors.get(f"{place.prefix}{_inside(spec.name)}/sketch")
            _restore(table, about.states[spec.name], sketch, counts=_begins_in(place.hashes, own))
    for data in about.staged:
        entry = decode_entry(data, held.kind)
        kept = [part for each in entry.parts if (part := _part(each, own, first=first)) is not None]
        if kept:
            held.stage(TableEntry(entry.worker, -1, entry.clock, kept))  # numbers begin anew


def row_set(tensors: Mapping[str, Keys], place: SavedPlace, about: SavedStore, table: str) -> RowSet:
    """Return which rows of a table are in one part of a checkpoint, and which keys were removed.

    Args:
        tensors: those that have keys, by name.
    """
    within = place.prefix + _inside(table)
    return RowSet(
        tensors.get(f"{within}/keys", NO_KEYS), tensors.get(f"{within}/removed", NO_KEYS),
        place.step == WHOLE or table in about.whole,
    )  # fmt: skip


def _add_rows(
    table: ShardTable, parts: Sequence[tuple[SavedPlace, SavedStore]], tensors: Mapping[str, torch.Tensor],
    own: tuple[int, int],
) -> None:  # fmt: skip
    """Add a shard's own rows of one table of a saved range."""
    name = table.kind.spec.name
    names = {f"{place.prefix}{_inside(name)}/{column}" for place, _ in parts for column in ("keys", "removed")}
    listed = {each: tensors[each].numpy() for each in names & tensors.keys()}
    sets = [row_set(listed, place, about, name) for place, about in parts]
    for (place, _), rows, counted in zip(parts, sets, newest_rows(sets), strict=True):
        mine = counted[_mine(name, rows.keys[counted], own)]
        if len(mine):
            within, at = place.prefix + _inside(name), torch.from_numpy(mine)
            lanes = Lanes(tensors[f"{within}/rows"], tensors.get(f"{within}/beside")).at(at)
            state, uses = tensors.get(f"{within}/state"), tensors.get(f"{within}/uses")
            table.set_absent(
                rows.keys[mine], lanes,
                None if state is None else state[at], None if uses is None else uses.numpy()[mine],
            )  # fmt: skip


def _restore(table: ShardTable, saved: SavedTable, sketch: torch.Tensor | None, *, counts: bool) -> None:
    """Set the settings, and add the counts of one saved range: those of keys, and (once) those of entries."""
    table.settings |= saved.settings
    table.changes = max(table.changes, saved.changes)
    if sketch is not None and table.sketch.cells.size:
        table.sketch.merge(Sketch(sketch.numpy(), saved.counted))
    for name, count in saved.counts.items() if counts else ():
        table.counts[name] += count


def _begins_in(saved: Range, own: tuple[int, int]) -> bool:
    """Return whether a saved range begins in a shard: so in exactly one."""
    return hashes(*own).start <= saved.start < hashes(*own).stop


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
