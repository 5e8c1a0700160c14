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

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.errors import UsageError
from psctl.ps.table_messages import PlainValue, Separation, StoreSpec, TableSpec, TableStats
from psctl.ps.tables.reductions import Array, Lanes, Reduction
from psctl.ps.tables.retention import SPARE, Sketch, admitted, evicted, expired, is_sweep, row_limit, use_at
from psctl.ps.tables.row_changes import RowChanges
from psctl.ps.tables.row_index import Keys, rounds
from psctl.ps.tables.row_optimizers import check_settings
from psctl.ps.tables.table_kinds import KEY_BYTES, Functions, TableKind, UserFunction, check_table

FOREVER = 1 << 62
"""The clock, and the mark, of a worker that has left: no worker waits for it."""

NUMBER_BITS = 32
"""Low bits of a sequence, which number the updates at one position of the run; the high bits are the position."""


def first_sequence_at(position: int) -> int:
    """Return the first sequence of a worker's updates at a position of the run."""
    return position << NUMBER_BITS


def last_sequence_at(position: int) -> int:
    """Return the last sequence of a worker's updates at a position of the run."""
    return first_sequence_at(position + 1) - 1


What: TypeAlias = Literal["update", "open", "removed"] | Separation


class EntryPart(msgspec.Struct, frozen=True):
    """An entry's change of one table. `numbers`: the sequence of each single push; their keys ascend."""

    what: str
    table: str
    spec: TableSpec | None
    keys: Keys | None  # None: all rows (call)
    lanes: Lanes | None
    function: str = ""
    arguments: dict[str, PlainValue] = {}
    numbers: Keys | None = None

    def pushed(self) -> tuple[Keys, Lanes]:
        """Return the keys and rows of a push or start."""
        assert self.keys is not None, "only a call has no keys"
        assert self.lanes is not None, "only a call has no rows"
        return self.keys, self.lanes

    def only(self, after: int, until: int) -> EntryPart:
        """Return this part with only those single pushes whose sequence is in (after, until]."""
        if self.numbers is None:
            return self
        kept = (self.numbers > after) & (self.numbers <= until)
        if kept.all():
            return self
        keys, lanes = self.pushed()
        return replace(self, keys=keys[kept], lanes=lanes.at(torch.from_numpy(kept)), numbers=self.numbers[kept])


class TableEntry(msgspec.Struct, frozen=True):
    """One entry of one worker in one shard.

    update: `parts`, within the worker's clock `clock`. clock: the worker has finished `clock` clocks. mark: its later
    entries do not belong to the checkpoint of step `clock`. open: it takes part, has marked step `clock`, and numbers
    its later entries above `sequence`. removed: it is lost and not replaced; its entries above sequence `clock` that
    are not applied yet are dropped.
    """

    worker: int
    sequence: int
    clock: int
    parts: list[EntryPart]
    what: What = "update"


COUNTED = ("pushed", "pushed_found", "admitted", "refused", "expired", "evicted")
"""Names of the counts of entries in a shard of a table."""

NO_SKETCH = Sketch(np.zeros((0, 0), dtype=np.uint8))
"""The sketch of a table that does not count keys."""


def _grown(column: Keys, count: int) -> Keys:
    """Return a column by slot with at least `count` values."""
    if len(column) >= count:
        return column
    return np.concatenate([column, np.zeros(count + count // 4 - len(column), dtype=column.dtype)])


class TableCut(msgspec.Struct, frozen=True, eq=False):
    """A moment after which the changes of a table's rows are known."""

    changes: RowChanges
    number: int

    def is_known(self, table: ShardTable) -> bool:
        """Whether the changes of this table since then are known."""
        return self.changes is table.row_changes and self.changes.is_known(self.number)


class ShardTable:
    """Rows of one table in one shard, with the number of the last change of each row.

    Args:
        kind: the table's.
        cache: whether the rows are copies of a server's: then they have no optimizer's state, and none is removed.
        shards: of the store.
        watched: whether the last change of each row is numbered.
    """

    def __init__(self, kind: TableKind, *, cache: bool = False, shards: int = 1, watched: bool = False) -> None:
        self.kind = kind
        self.now = 0
        """The clocks that all workers have finished."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        """Counts of entries, the same on all replicas."""
        self.read_counts = [0, 0]
        """Rows read here, and those of them that existed."""
        self.uses = np.zeros(0, dtype=np.int64)
        """By slot: its last use (retention.use_at), if rows may leave."""
        self.sketch = Sketch() if kind.spec.admit is not None and kind.spec.admit.count > 1 and not cache else NO_SKETCH
        self._removes, self._watched, self._cache = kind.removes and not cache, watched, cache
        self.settings = dict(kind.optimizer.settings) if kind.optimizer is not None else {}
        """The optimizer's, in use now."""
        self.rows = kind.rows(self._new_state if kind.optimizer is not None and not cache else None)
        self._limit = row_limit(kind.spec, kind.row_cost, shards) if not cache else None
        self.rows.most = self._limit
        self.changes = 0
        self.stamps = np.zeros(0, dtype=np.int64)
        """By slot."""
        self.row_changes: RowChanges | None = None
        """The rows that have changed since the cuts of checkpoints; None before the first cut."""

    def push(self, keys: Keys, lanes: Lanes) -> None:
        """Combine pushed rows with those here; each key is given once."""
        slots = self.rows.find(keys)
        present = slots >= 0
        found = np.count_nonzero(present)
        all_present = found == len(present)
        self.counts["pushed"] += len(keys)
        self.counts["pushed_found"] += int(found)
        if not all_present and self.kind.spec.admit is not None and not self._cache:
            kept = present.copy()
            kept[~present] = admitted(self.kind.spec.admit, keys[~present], self.sketch)
            self.counts["refused"] += len(kept) - int(np.count_nonzero(kept))
            keys, lanes, slots, present = keys[kept], lanes.at(torch.from_numpy(kept)), slots[kept], present[kept]
            all_present = bool(present.all())
            if not len(keys):
                return
        if not all_present:
            slots[~present] = new = self.rows.add(keys[~present])
            self.counts["admitted"] += len(new)
        self._combine(slots, present, lanes, keys, all_present=all_present)
        if self._limit is not None and len(self.rows) > self._limit:
            self._evict(len(self.rows) - self._limit + self._limit // SPARE)

    def _combine(self, slots: Keys, present: Array, lanes: Lanes, keys: Keys, *, all_present: bool) -> None:
        at = torch.from_numpy(slots)
        if all_present and self.kind.only_sums:
            self.rows.lanes.values.index_add_(0, at, lanes.values)  # in place: copies a third of the bytes
            self.stamp(slots)
            return
        if self.kind.optimizer is not None:
            self._step(slots, present, lanes, keys)
            return
        self.rows.lanes.put(at, self.kind.after_push(self.rows.lanes.at(at), present, lanes, keys))
        self.stamp(slots)

    def _step(self, slots: Keys, present: Array, lanes: Lanes, keys: Keys) -> None:
        """Apply gradients by the optimizer."""
        optimizer, rows, at = self.kind.optimizer, self.rows, torch.from_numpy(slots)
        assert optimizer is not None, "checked by the caller"
        assert rows.state is not None, "a server's table has the state"
        if not present.all():
            rows.lanes.put(at[torch.from_numpy(~present)], self.kind.initial_rows(keys[~present]))
        state = rows.state.index_select(0, at)
        gradients = self.kind.reduction.finish(lanes)
        rows.lanes.put(at, Lanes(optimizer.step(rows.lanes.at(at).values, gradients, state, self.settings)))
        rows.state[at] = state
        self.stamp(slots)

    def _new_state(self, count: int) -> torch.Tensor:
        assert self.kind.optimizer is not None, "only a table with an optimizer has a state"
        return self.kind.optimizer.new_state(count, self.settings)

    def configure(self, settings: dict[str, PlainValue]) -> None:
        """Change settings of the optimizer, which later pushes use.

        Raises:
            UsageError: the table has no optimizer, or a setting is invalid.
        """
        self.settings |= checked_settings(self.kind.spec, settings)

    def apply_push(self, part: EntryPart) -> None:
        """Apply a push: of one call, or of single pushes, in which a key may occur several times."""
        keys, lanes = part.pushed()
        found = rounds(keys) if part.numbers is not None else ()
        plain = self.kind.only_sums and not self.kind.has_initial and self.kind.spec.admit is None
        if len(found) > 1 and plain:  # sums need existing rows, no rounds
            new = keys[found[0]]
            self.counts["admitted"] += len(self.rows.add(new[self.rows.find(new) < 0]))
            found = ()
        if len(found) < 2:
            self.push(keys, lanes)
            return
        for indices in found:
            self.push(keys[indices], lanes.at(torch.from_numpy(indices)))

    def set_absent(self, keys: Keys, lanes: Lanes, state: torch.Tensor | None = None, uses: Keys | None = None) -> None:
        """Set those of the rows that are absent.

        Args:
            keys: of the rows, each given once.
            lanes: the rows.
            state: the optimizer's state of all of them; None: a new one.
            uses: their last uses; None: now.
        """
        absent = self.rows.find(keys) < 0
        if absent.any():
            slots = self.rows.add(keys[absent])
            self.rows.lanes.put(torch.from_numpy(slots), lanes.at(torch.from_numpy(absent)))
            if state is not None and self.rows.state is not None:
                self.rows.state[torch.from_numpy(slots)] = state[torch.from_numpy(absent)]
            self.stamp(slots)
            if uses is not None and self._removes:
                self.uses[slots] = uses[absent]

    def call(self, function: UserFunction, keys: Keys | None, arguments: dict[str, PlainValue]) -> None:
        """Replace existing rows (of these keys, or all) by the function's result for (keys, values)."""
        slots = np.arange(len(self.rows)) if keys is None else self.rows.find(keys)
        slots = slots[slots >= 0]
        if len(slots):
            at = torch.from_numpy(slots)
            old = self.rows.lanes.at(at).values
            new = function(torch.from_numpy(self.rows.keys[slots]), old, **arguments)
            self.rows.lanes.values[at] = new.view(old.shape)
            self.stamp(slots)

    def read(self, keys: Keys) -> tuple[Array, Lanes]:
        """Return which rows exist, and the rows (undefined values where none exists)."""
        slots = self.rows.find(keys)
        if not len(self.rows):
            return slots >= 0, self.rows.zeros(len(keys))
        return slots >= 0, self.rows.lanes.at(torch.from_numpy(np.maximum(slots, 0)))

    def read_values(self, keys: Keys) -> torch.Tensor:
        """Return the rows as a reader receives them, start values for absent rows."""
        present, lanes = self.read(keys)
        self.read_counts[0] += len(keys)
        self.read_counts[1] += int(np.count_nonzero(present))
        return self.kind.as_read(lanes, present, keys).values

    def stamp(self, slots: Keys) -> None:
        """Note that these rows have changed."""
        self.changes += 1
        if self.row_changes is not None:
            self.row_changes.note_changed(slots, len(self.rows))
        if self._watched:
            self.stamps = _grown(self.stamps, len(self.rows))
            self.stamps[slots] = self.changes
        if self._removes:
            self.uses = _grown(self.uses, len(self.rows))
            self.uses[slots] = use_at(self.now, self.changes)

    def watch(self) -> int:
        """Number the last change of each row from now on; return the number of the newest change."""
        self._watched = True
        return self.changes

    def changed_since(self, keys: Keys, change: int) -> Keys:
        """Return those of the keys whose rows have changed after a change; rows that are absent have not."""
        slots = self.rows.find(keys)
        self.stamps = _grown(self.stamps, len(self.rows))
        found: Keys = keys[(slots >= 0) & (self.stamps[np.maximum(slots, 0)] > change)] if len(self.rows) else keys[:0]
        return found

    def advance(self, clock: int) -> None:
        """Note a new clock, and remove the rows that expire."""
        before, self.now = self.now, max(clock, self.now)
        age = self.kind.spec.expire
        if age and len(self.rows) and is_sweep(before, self.now, age):
            gone = expired(self.uses[: len(self.rows)], self.now, age)
            self.counts["expired"] += len(gone)
            self._remove(gone)

    def _evict(self, count: int) -> None:
        gone = evicted(self.uses[: len(self.rows)], self.rows.keys, count)
        self.counts["evicted"] += len(gone)
        self._remove(gone)

    def _remove(self, slots: Keys) -> None:
        if len(slots):
            keys = self.rows.keys.take(slots)
            moved, to = self.rows.remove(slots)
            self.uses[to] = self.uses[moved]
            if self.row_changes is not None:
                self.row_changes.note_removed(keys, moved, to, len(self.rows))

    def cut(self) -> TableCut:
        """Begin to note which rows change after this moment; return it."""
        if self.row_changes is None:
            self.row_changes = RowChanges(len(self.rows))
        return TableCut(self.row_changes, self.row_changes.cut())

    @property
    def stats(self) -> TableStats:
        """Its counts so far."""
        size = len(self.rows) * (self.kind.row_cost - KEY_BYTES) + self.rows.index_bytes + self.uses.nbytes
        read, found = self.read_counts
        return TableStats(len(self.rows), size, **self.counts, read=read, read_found=found)


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
    def finite_clock(self) -> int:
        """The clock by which the age of rows is measured: it does not go on when all workers have left."""
        return min((clock for clock in self.clocks.values() if clock < FOREVER), default=0)

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
            check_table(self.spec, spec)
            kind = TableKind(spec, self._functions)
            found = ShardTable(kind, shards=self.spec.shards, watched=self.spec.eager)
            found.now = self.finite_clock
            self.tables[spec.name] = found
        elif found.kind.spec != spec:
            raise spec_conflict(found.kind.spec, spec)
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
        if entry.what in ("mark", "removed") or entry.clock == FOREVER:
            step, marked = entry.clock if entry.what == "mark" else FOREVER, self.marks.get(entry.worker, -1)
            self.marks[entry.worker] = max(step, marked)
            new = new or step > marked
        elif entry.what == "common-mark":
            new = new or entry.clock > self.cut
            self.marks = {worker: max(entry.clock, marked) for worker, marked in self.marks.items()}
        if not new:
            return False
        if entry.what == "clock":
            self._advance([entry.worker], entry.clock)
        elif entry.what == "common-clock":
            self._advance(list(self.clocks), entry.clock)
        elif entry.what == "removed":
            self._drop(entry.worker, entry.clock)
            self._advance([entry.worker], FOREVER)
        staged = []
        for part in (part.only(last, entry.sequence) for part in entry.parts):
            if part.spec is not None:
                self.table(part.spec)
            if part.what == "start":
                self.tables[part.table].set_absent(*part.pushed())
            elif self.spec.staleness == 0 and entry.worker in self.clocks:
                staged.append(part)
            else:
                self._apply_part(part)
        if staged:
            self.stage(replace(entry, parts=staged))
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
        returns = marked == FOREVER and step < FOREVER and self.sequences.get(worker, -1) <= after
        if marked is not None and not returns:
            return False
        self.marks[worker] = step
        return True

    def _advance(self, workers: Iterable[int], clock: int) -> None:
        before = self.clock
        for worker in workers:
            if worker in self.clocks:
                self.clocks[worker] = max(clock, self.clocks[worker])
        if self.clock > before:
            self._apply_staged(clock for clock in self.staged if clock < self.clock)
            for table in self.tables.values():
                table.advance(self.finite_clock)

    def reopen(self, spec: StoreSpec) -> None:
        """Take the spec of the run that resumes from this shard's checkpoint; all begin at the checkpoint's clock."""
        self.clocks = dict.fromkeys(spec.group, min(self.clocks.values(), default=0))
        self.spec, self.restored, self.sequences, self.marks = spec, False, {}, {}
        if spec.staleness != 0:
            self._apply_staged(list(self.staged))

    def _apply_part(self, part: EntryPart) -> None:
        table = self.tables[part.table]
        if part.what == "call":
            table.call(self._functions.function(part.function), part.keys, part.arguments)
        elif part.what == "configure":
            table.configure(part.arguments)
        else:
            table.apply_push(part)

    def _apply_staged(self, clocks: Iterable[int]) -> None:
        """Apply these clocks: the settings of each, its pushes combined in the order of ranks, then its calls."""
        for clock in sorted(clocks):
            workers = self.staged.pop(clock)
            parts = [part for worker in sorted(workers) for entry in workers[worker] for part in entry.parts]
            for part in parts:
                if part.what == "configure":
                    self._apply_part(part)
            for name in dict.fromkeys(part.table for part in parts):
                pushes = [part for part in parts if part.table == name and part.what == "push"]
                if pushes:
                    fold = any(part.numbers is not None for part in pushes)
                    reduction = self.tables[name].kind.reduction
                    self.tables[name].push(*merged(reduction, [part.pushed() for part in pushes], fold=fold))
            for part in parts:
                if part.what == "call":
                    self._apply_part(part)


def _until(entry: TableEntry, last: int) -> list[TableEntry]:
    """Return the part of an entry with sequences up to `last`: a list of one entry, or empty."""
    if entry.sequence <= last:
        return [entry]
    parts = [part.only(-1, last) for part in entry.parts if part.numbers is not None]
    return [replace(entry, sequence=last, parts=parts)] if parts else []


def checked_settings(spec: TableSpec, settings: Mapping[str, PlainValue]) -> dict[str, float]:
    """Return settings of a table's optimizer that fit it.

    Raises:
        UsageError: the table has no optimizer, or a setting is unknown, no number, or out of range.
    """
    what = f"key {spec.name!r}" if spec.name else "the rows of integer keys"
    if spec.optimizer is None:
        raise UsageError(f"{what} have no optimizer", "declare them with optimizer=")
    numbers: dict[str, float] = {}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name}={value!r} of optimizer {spec.optimizer.name!r}", "give a number")
        numbers[name] = float(value)
    check_settings(spec.optimizer.name, numbers)
    return numbers


def spec_conflict(held: TableSpec, asked: TableSpec) -> UsageError:
    """Return the error for a table that is described differently from before."""
    what = f"key {held.name!r}" if held.name else "the rows of integer keys"
    for field in held.__struct_fields__:
        ours, theirs = getattr(held, field), getattr(asked, field)
        if ours != theirs:
            break
    return UsageError(
        f"{what}: {field} is {ours!r} in the store, and this call has {theirs!r}",
        "use the same properties everywhere: declare the key on every rank, before the first push",
    )


def merged(reduction: Reduction, pushed: list[tuple[Keys, Lanes]], *, fold: bool = False) -> tuple[Keys, Lanes]:
    """Return the keys of several pushes, each once and ascending, with their rows combined in the order given.

    Args:
        fold: whether one push may contain a key several times.
    """
    if len(pushed) == 1 and not fold:
        return pushed[0]
    keys = np.concatenate([keys for keys, _ in pushed])
    order = np.argsort(keys, kind="stable")
    unique, groups = np.unique(keys[order], return_inverse=True)
    values = torch.cat([lanes.values for _, lanes in pushed])
    extra = [lanes.extra for _, lanes in pushed if lanes.extra is not None]
    lanes = Lanes(values, torch.cat(extra) if extra else None).at(torch.from_numpy(order))
    return unique, reduction.fold(lanes, torch.from_numpy(groups), len(unique))
