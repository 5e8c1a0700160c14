"""A server's part of a checkpoint of tables: each shard that it leads, as it was when all had marked the step.

A part has all rows of its shards, or (where checkpoints may be incremental) those that have changed since the last part
of a complete checkpoint, its base. A part is incremental when its base has a copy of no shard that the server does not
lead any more, and when it is worth it: the parts since the last one with all rows are few, and less than half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from psctl.ps.outputs import SaveSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.ps.tables.server.saved_tables import copy_changes, copy_shard
from psctl.ps.tables.server.table_shard import HostedShard, led_shards
from psctl.ps.tables.table_kinds import KEY_BYTES
from psctl.ps.tables.table_state import FOREVER, ShardTable, TableCut, TableShard

KEPT = 2
"""Checkpoints kept until they are requested."""

UNANSWERED = 8
"""Parts that may become a base, while it is not known whether their checkpoints are complete."""

LARGEST = 0.5
"""Bytes of the changes since a part with all rows, over the bytes of that part: beyond it all rows are sent again."""

Place: TypeAlias = tuple[str, int]
"""A store's name and a shard."""


class TablePart(msgspec.Struct, eq=False):
    """The part of the checkpoint of `step`.

    `whole_bytes`: of the newest part with all rows; `added`: of the changes since then, its own too.
    """

    step: int
    base: TablePart | None
    copies: dict[Place, list[CopiedSlice]] = {}
    cuts: dict[Place, dict[str, TableCut]] = {}
    whole_bytes: int = 0
    added: int = 0
    length: int = 1
    """Parts from the one with all rows to this one."""

    def add(self, place: Place, copied: list[CopiedSlice], cuts: dict[str, TableCut]) -> None:
        """Add the copy of a shard, and the moment at which it was made."""
        size = sum(len(each.data) for each in copied)
        self.copies[place], self.cuts[place] = copied, cuts
        if self.base is None:
            self.whole_bytes += size
        else:
            self.added += size


class TableCheckpoints:
    """Copies that were taken.

    Args:
        hosted: the server's shards.
        shards: how many each store has.
        full_every: a part has all rows at least once in so many.
    """

    def __init__(self, hosted: Mapping[int, HostedShard], shards: int, full_every: int = 1) -> None:
        self.wanted: int | None = None
        """The step of the checkpoint that this server is to send its part of."""
        self._hosted, self._shards, self._full_every = hosted, shards, full_every
        self._parts: dict[int, TablePart] = {}  # by step: not sent yet
        self._sent: dict[int, TablePart] = {}  # by step: without their copies; each may become a base
        self._base: TablePart | None = None

    def add_copy(self, store: TableShard, shard: int) -> None:
        """Copy a shard in which all workers have marked a step."""
        self._copy(self._part_of(store.cut), store, shard)
        for old in sorted(self._parts)[:-KEPT]:
            del self._parts[old]

    def forget(self, shard: int) -> None:
        """Forget the copies of a shard that another server leads, and the bases that have one."""
        for part in self._parts.values():
            for place in [place for place in part.copies if place[1] == shard]:
                del part.copies[place]
        with_shard = [step for step, part in self._sent.items() if any(place[1] == shard for place in part.cuts)]
        for step in with_shard:
            del self._sent[step]
        if self._base is not None and self._base.step in with_shard:
            self._base = None

    def on_saved(self, step: int) -> None:
        """Note that the checkpoint of a step is complete: later parts may be based on it; -1: on none."""
        if self._base is not None and 0 <= step < self._base.step:
            return
        self._base = self._sent.get(step)
        self._sent = {at: part for at, part in self._sent.items() if at >= step} if step >= 0 else {}
        if self._base is not None and not any(part.base is not None for part in self._parts.values()):
            for cuts in self._base.cuts.values():
                for cut in cuts.values():
                    cut.changes.forget_removed(cut.number)

    def take_part(self) -> SaveSlices | None:
        """Return this server's part of the checkpoint that is wanted, once, when it is there."""
        if self.wanted is None:
            return None
        step = self.wanted
        part = self._parts.get(step)
        left: list[tuple[TableShard, int]] = []
        for hosted in led_shards(self._hosted):
            for name, store in hosted.state.stores.items():
                if part is not None and (name, hosted.shard) in part.copies:
                    continue
                if store.cut < step:
                    return None
                if store.cut == FOREVER:  # all have left it: it does not change any more
                    left.append((store, hosted.shard))
        part, self.wanted = self._part_of(step), None
        for store, shard in left:
            self._copy(part, store, shard)
        for old in [old for old in self._parts if old <= step]:
            del self._parts[old]
        copied = [each for place in sorted(part.copies) for each in part.copies[place]]
        base, part.base, part.copies = part.base, None, {}
        if self._full_every > 1:
            self._sent[step] = part
            for old in [each for each in sorted(self._sent)[:-UNANSWERED] if self._sent[each] is not self._base]:
                del self._sent[old]
        return SaveSlices(step, copied, None if base is None else base.step)

    def _part_of(self, step: int) -> TablePart:
        """Return the part of a step, begun if there is none; what it is based on is decided here for all shards."""
        if step not in self._parts:
            base = self._base_of(step)
            part = self._parts[step] = TablePart(step, base)
            if base is not None:
                part.whole_bytes, part.added, part.length = base.whole_bytes, base.added, base.length + 1
        return self._parts[step]

    def _base_of(self, step: int) -> TablePart | None:
        """Return the part on which that of a step is to be based; None: it is to have all rows."""
        base = self._base
        if base is None or base.step >= step or base.length >= self._full_every:
            return None
        led = {(name, hosted.shard): store
               for hosted in led_shards(self._hosted) for name, store in hosted.state.stores.items()}  # fmt: skip
        if not base.cuts.keys() <= led.keys():
            return None
        added = sum(
            _size_of_changes(table, base.cuts.get(place, {}).get(name))
            for place, store in led.items() for name, table in store.tables.items()
        )  # fmt: skip
        return base if base.added + added <= LARGEST * base.whole_bytes else None

    def _copy(self, part: TablePart, store: TableShard, shard: int) -> None:
        place = (store.spec.name, shard)
        since = part.base.cuts.get(place) if part.base is not None else None
        if since is None:
            copied = copy_shard(store, shard, self._shards)
        else:
            copied = copy_changes(store, shard, self._shards, part.step, since)
        cuts = {name: table.cut() for name, table in store.tables.items()} if self._full_every > 1 else {}
        part.add(place, copied, cuts)


def _size_of_changes(table: ShardTable, cut: TableCut | None) -> int:
    """Return about how many bytes the copy of a table's changes since a cut takes; None: of all its rows."""
    rows, removed = len(table.rows), 0
    if cut is not None and cut.is_known(table):
        rows = len(cut.changes.changed_since(cut.number, rows))
        removed = len(cut.changes.removed_since(cut.number))
    return rows * (table.kind.row_cost - KEY_BYTES + 16) + removed * 8 + table.sketch.cells.nbytes
