"""A shard of a store as a state machine: entries change rows and clocks; the same entries give the same bits.

    apply(entry)     a push, start or call; a worker's clock, mark or first entry; an entry that is not newer than the
                     worker's last is dropped
    read             rows as they are

Under asp and ssp an entry is applied when it arrives. Under bsp the pushes of a clock are kept until all workers of the
group have finished that clock; then they are combined in the order of ranks and applied once, so that a run repeats to
the bit and a reader at clock c sees exactly the clocks before c (and its own pushes, which its client adds to them).

Checkpoints. Each worker marks, between two of its updates, the cut of the checkpoint of step c; the shard's state when
the last worker has marked is the checkpoint's, because the entries of a worker that has marked are held back until then
(`is_held_back`; Chandy and Lamport's markers with channels that are drained, as in Flink's aligned barriers). So the
state contains all pushes of all workers up to step c and nothing else, and a run that is resumed from it repeats every
later push exactly once. The state itself determines which workers are held back, so a replica that becomes the primary
needs no further information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import StoreSpec, TableSpec
from psctl.ps.tables.reductions import Lanes, Reduction
from psctl.ps.tables.row_index import Keys, rounds
from psctl.ps.tables.table_kinds import Functions, TableKind

FOREVER = 1 << 62
"""The clock, and the mark, of a worker that has left: no worker waits for it."""

PLACES = 32
"""Low bits of a sequence, which count updates in one place of the run; the high bits are the place."""


def first_of(place: int) -> int:
    """Return the first sequence of a worker's updates at a place of the run."""
    return place << PLACES


def last_of(place: int) -> int:
    """Return the last sequence of a worker's updates at a place of the run."""
    return first_of(place + 1) - 1


What: TypeAlias = Literal["update", "clock", "mark", "open", "gone"]


class EntryPart(msgspec.Struct, frozen=True):
    """An entry's change of one table. `numbers`: the sequence of each single push; their keys ascend."""

    what: str
    table: str
    spec: TableSpec | None
    keys: Keys | None  # None: all rows (call)
    lanes: Lanes | None
    function: str = ""
    arguments: dict[str, Any] = {}
    numbers: Keys | None = None

    def only(self, after: int, until: int) -> EntryPart:
        """Return this part with only those single pushes whose sequence is in (after, until]."""
        if self.numbers is None:
            return self
        kept = (self.numbers > after) & (self.numbers <= until)
        if kept.all():
            return self
        assert self.keys is not None
        assert self.lanes is not None
        lanes = self.lanes.at(torch.from_numpy(kept))
        return msgspec.structs.replace(self, keys=self.keys[kept], lanes=lanes, numbers=self.numbers[kept])


class TableEntry(msgspec.Struct, frozen=True):
    """One entry of one worker in one shard.

    update: `parts`, within the worker's clock `clock`. clock: the worker has finished `clock` clocks. mark: its later
    entries do not belong to the checkpoint of step `clock`. open: it takes part, has marked step `clock`, and numbers
    its later entries above `sequence`. gone: it is lost for good; its entries above sequence `clock` that are not
    applied yet are dropped.
    """

    worker: int
    sequence: int
    clock: int
    parts: list[EntryPart]
    what: What = "update"


class ShardTable:
    """Rows of one table in one shard, with the number of the last change of each row."""

    def __init__(self, kind: TableKind) -> None:
        self.kind = kind
        self.rows = kind.rows()
        self.changes = 0
        self.stamps = np.zeros(0, dtype=np.int64)
        """By slot."""

    def push(self, keys: Keys, lanes: Lanes) -> None:
        """Combine pushed rows with those here; each key is given once."""
        slots = self.rows.find(keys)
        there = slots >= 0
        all_there = np.count_nonzero(there) == len(there)
        if not all_there:
            slots[~there] = self.rows.add(keys[~there])
        at = torch.from_numpy(slots)
        if all_there and self.kind.adds:
            self.rows.lanes.values.index_add_(0, at, lanes.values)  # in place: copies a third of the bytes
            self.stamp(slots)
            return
        self.rows.lanes.put(at, self.kind.joined(self.rows.lanes.at(at), there, lanes, keys))
        self.stamp(slots)

    def join(self, part: EntryPart) -> None:
        """Apply a push: of one call, or of single pushes, in which a key may occur several times."""
        assert part.keys is not None
        assert part.lanes is not None
        if part.numbers is None:
            self.push(part.keys, part.lanes)
            return
        turns = rounds(part.keys)
        if len(turns) > 1 and self.kind.adds and not self.kind.starts:  # sums need no rounds, only an existing row
            new = part.keys[turns[0]]
            self.rows.add(new[self.rows.find(new) < 0])
            self.push(part.keys, part.lanes)
            return
        for places in turns:
            whole = len(turns) == 1
            self.push(part.keys[places], part.lanes if whole else part.lanes.at(torch.from_numpy(places)))

    def begin(self, keys: Keys, lanes: Lanes) -> None:
        """Set those rows that are absent."""
        absent = self.rows.find(keys) < 0
        if absent.any():
            slots = self.rows.add(keys[absent])
            self.rows.lanes.put(torch.from_numpy(slots), lanes.at(torch.from_numpy(absent)))
            self.stamp(slots)

    def call(self, function: Callable[..., Any], keys: Keys | None, arguments: dict[str, Any]) -> None:
        """Replace existing rows (of these keys, or all) by the function's result for (keys, values)."""
        slots = np.arange(len(self.rows)) if keys is None else self.rows.find(keys)
        slots = slots[slots >= 0]
        if len(slots):
            at = torch.from_numpy(slots)
            old = self.rows.lanes.at(at).values
            self.rows.lanes.values[at] = function(torch.from_numpy(self.rows.keys[slots]), old, **arguments).view(
                old.shape
            )
            self.stamp(slots)

    def read(self, keys: Keys) -> tuple[Any, Lanes]:
        """Return which rows exist, and the rows (undefined values where none exists)."""
        slots = self.rows.find(keys)
        if not len(self.rows):
            return slots >= 0, self.rows.empty(len(keys))
        return slots >= 0, self.rows.lanes.at(torch.from_numpy(np.maximum(slots, 0)))

    def stamp(self, slots: Keys) -> None:
        """Note that these rows have changed."""
        if len(self.stamps) < len(self.rows):
            grown = np.zeros(2 * len(self.rows), dtype=np.int64)
            grown[: len(self.stamps)] = self.stamps
            self.stamps = grown
        self.changes += 1
        self.stamps[slots] = self.changes


class TableShard:
    """One shard.

    Args:
        spec: the store's.
        functions: reductions and users' functions.
    """

    def __init__(self, spec: StoreSpec, functions: Functions) -> None:
        self.spec = spec
        self.tables: dict[str, ShardTable] = {}
        self.sequences: dict[int, int] = {}
        """The last entry of each worker."""
        self.clocks: dict[int, int] = dict.fromkeys(spec.group, 0)
        self.marks: dict[int, int] = {}
        """The newest step that each worker has marked."""
        self.staged: dict[int, dict[int, list[TableEntry]]] = {}
        """By clock, by worker: its updates in order."""
        self.restored = False
        """Whether the shard was read from a checkpoint and not opened yet; the first to open it sets its spec."""
        self._functions = functions

    @property
    def clock(self) -> int:
        """Clocks that all of the group have finished."""
        return min(self.clocks.values(), default=0)

    @property
    def cut(self) -> int:
        """The newest step that all have marked."""
        return min(self.marks.values(), default=FOREVER)

    def is_held_back(self, worker: int) -> bool:
        """Whether a worker's entries wait until the others have marked the step that it has marked."""
        return FOREVER > self.marks.get(worker, -1) > self.cut

    def kind(self, name: str, spec: TableSpec | None) -> TableKind:
        """Return a table's kind, also when the table does not exist yet."""
        found = self.tables.get(name)
        if found is None or (spec is not None and found.kind.spec != spec):
            assert spec is not None, "an entry describes its table unless the table exists"
            return TableKind(spec, self._functions)
        return found.kind

    def table(self, spec: TableSpec) -> ShardTable:
        """Return a table, made if it does not exist.

        Raises:
            UsageError: it exists with another spec, or the spec is invalid.
        """
        found = self.tables.get(spec.name)
        if found is None:
            found = self.tables[spec.name] = ShardTable(TableKind(spec, self._functions))
        elif found.kind.spec != spec:
            raise differs(found.kind.spec, spec)
        return found

    def apply(self, entry: TableEntry) -> bool:
        """Apply an entry; return False when it was applied before.

        Raises:
            Exception: raised by a user's function.
        """
        if entry.what == "open":
            return self._on_open(entry.worker, entry.clock, entry.sequence)
        last = self.sequences.get(entry.worker, -1)
        new = entry.sequence > last
        if new:
            self.sequences[entry.worker] = entry.sequence
        if entry.what in ("mark", "gone") or entry.clock == FOREVER:
            step, marked = entry.clock if entry.what == "mark" else FOREVER, self.marks.get(entry.worker, -1)
            self.marks[entry.worker] = max(step, marked)
            new = new or step > marked
        if not new:
            return False
        if entry.what == "clock":
            self._advance(entry.worker, entry.clock)
        elif entry.what == "gone":
            self._drop(entry.worker, entry.clock)
            self._advance(entry.worker, FOREVER)
        staged = []
        for part in (part.only(last, entry.sequence) for part in entry.parts):
            if part.spec is not None:
                self.table(part.spec)
            if part.what == "start":
                assert part.keys is not None
                assert part.lanes is not None
                self.tables[part.table].begin(part.keys, part.lanes)
            elif self.spec.staleness == 0 and entry.worker in self.clocks:
                staged.append(part)
            else:
                self._apply_part(part)
        if staged:
            self.stage(msgspec.structs.replace(entry, parts=staged))
        return True

    def stage(self, entry: TableEntry) -> None:
        """Keep an update until its clock is complete."""
        self.staged.setdefault(entry.clock, {}).setdefault(entry.worker, []).append(entry)

    def _drop(self, worker: int, last: int) -> None:
        for workers in self.staged.values():
            if worker in workers:
                workers[worker] = [each for entry in workers[worker] for each in _until(entry, last)]

    def _on_open(self, worker: int, step: int, after: int) -> bool:
        marked = self.marks.get(worker)
        back = marked == FOREVER and step < FOREVER and self.sequences.get(worker, -1) <= after
        if marked is not None and not back:
            return False
        self.marks[worker] = step
        return True

    def _advance(self, worker: int, clock: int) -> None:
        before = self.clock
        if worker in self.clocks:
            self.clocks[worker] = max(clock, self.clocks[worker])
        if self.clock > before:
            self._apply_staged()

    def reopen(self, spec: StoreSpec) -> None:
        """Take the spec of the run that resumes from this shard's checkpoint; all begin at the checkpoint's clock."""
        self.clocks = dict.fromkeys(spec.group, min(self.clocks.values(), default=0))
        self.spec, self.restored, self.sequences, self.marks = spec, False, {}, {}
        if spec.staleness != 0:
            self._apply(list(self.staged))

    def _apply_part(self, part: EntryPart) -> None:
        table = self.tables[part.table]
        if part.what == "call":
            table.call(self._functions.function(part.function), part.keys, part.arguments)
        else:
            assert part.keys is not None
            assert part.lanes is not None
            table.join(part)

    def _apply_staged(self) -> None:
        """Apply the clocks that are complete: a clock's pushes combined in the order of ranks, then its calls."""
        self._apply(clock for clock in self.staged if clock < self.clock)

    def _apply(self, clocks: Iterable[int]) -> None:
        for clock in sorted(clocks):
            workers = self.staged.pop(clock)
            parts = [part for worker in sorted(workers) for entry in workers[worker] for part in entry.parts]
            for name in dict.fromkeys(part.table for part in parts):
                its = [part for part in parts if part.table == name and part.what == "push"]
                pushed = [(part.keys, part.lanes) for part in its]
                if pushed:
                    fold = any(part.numbers is not None for part in its)
                    keys, lanes = merged(self.tables[name].kind.reduction, pushed, fold=fold)
                    self.tables[name].push(keys, lanes)
            for part in parts:
                if part.what == "call":
                    self._apply_part(part)


def _until(entry: TableEntry, last: int) -> list[TableEntry]:
    """Return the part of an entry with sequences up to `last`: a list of one entry, or empty."""
    if entry.sequence <= last:
        return [entry]
    parts = [part.only(-1, last) for part in entry.parts if part.numbers is not None]
    return [msgspec.structs.replace(entry, sequence=last, parts=parts)] if parts else []


def differs(held: TableSpec, asked: TableSpec) -> UsageError:
    """Return the error for a table that is described differently from before."""
    what = f"key {held.name!r}" if held.name else "the rows of integer keys"
    for field in held.__struct_fields__:
        ours, theirs = getattr(held, field), getattr(asked, field)
        if ours != theirs:
            break
    return UsageError(
        f"{what}: {field} is {ours!r} in the store, and {theirs!r} was asked for",
        "push and declare a key alike everywhere: declare it on every rank, before the first push",
    )


def merged(reduction: Reduction, pushed: list[Any], *, fold: bool = False) -> tuple[Keys, Lanes]:
    """Return the keys of several pushes, each once and ascending, with their rows combined in the order given.

    Args:
        fold: whether one push may contain a key several times.
    """
    if len(pushed) == 1 and not fold:
        keys, lanes = pushed[0]
        return keys, lanes
    keys = np.concatenate([keys for keys, _ in pushed])
    order = np.argsort(keys, kind="stable")
    unique, groups = np.unique(keys[order], return_inverse=True)
    values = torch.cat([lanes.values for _, lanes in pushed])
    extra = None if pushed[0][1].extra is None else torch.cat([lanes.extra for _, lanes in pushed])
    lanes = Lanes(values, extra).at(torch.from_numpy(order))
    return unique, reduction.fold(lanes, torch.from_numpy(groups), len(unique))
