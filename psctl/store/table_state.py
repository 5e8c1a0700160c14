"""A shard of a store as a replicated state machine: entries in, rows and clocks; the same entries give the same bits.

    apply(entry)     push, start, call, or a worker's clock; one that is not newer than the worker's last is dropped
    read, scan       rows as they are
    snapshot, restore

Under asp and ssp an entry is applied when it comes. Under bsp what is pushed within a clock is kept until all of the
group have finished that clock; then it is joined in the order of ranks and applied once, so that a run repeats to the
bit and a reader of clock c sees exactly the clocks before c (and its own pushes, which its own end lays over them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from psctl.errors import UsageError
from psctl.store.pieces import torch_dtype
from psctl.store.reductions import Lanes, Reduction
from psctl.store.rows import Keys, Rows
from psctl.store.table_messages import StoreSpec, TableSpec
from psctl.store.table_packing import Reader, lanes_arrays, pack

FOREVER = 1 << 62
"""The clock of a worker that has left: nobody waits for it."""


class Functions(Protocol):
    """Where reductions and users' functions come from; runtime/ imports them from the job's folder."""

    def reduction(self, name: str) -> Reduction:
        """Return a reduction by its name or module:function."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return a user's function by its module:function."""


class Kind:
    """A table's spec with its functions in hand.

    Raises:
        UsageError: the spec makes no sense, or names what cannot be had; the user's fault.
    """

    def __init__(self, spec: TableSpec, functions: Functions) -> None:
        self.spec = spec
        self.dtype = torch_dtype(spec.dtype)
        self.reduction = functions.reduction(spec.reduce)
        self.reduction.check(self.dtype)
        self.beside = self.reduction.width(spec.width)
        self.held_beside = 0 if spec.apply else self.beside
        self._apply = functions.function(spec.apply) if spec.apply else None
        self._initial = functions.function(spec.initial) if isinstance(spec.initial, str) else None
        self.starts = spec.initial is not None or bool(spec.apply)
        """An absent row is something to a push, and not nothing."""
        self.adds = spec.reduce == "sum" and not spec.apply

    def rows(self) -> Rows:
        """Return an empty table."""
        return Rows(self.spec.width, self.dtype, self.held_beside)

    def start(self, keys: Keys) -> Lanes:
        """Return what absent rows are."""
        lanes = Rows(self.spec.width, self.dtype, self.held_beside).empty(len(keys))
        if self._initial is not None:
            lanes.values.copy_(self._initial(torch.from_numpy(keys.copy()), self.spec.width).view(lanes.values.shape))
        elif isinstance(self.spec.initial, int | float):
            lanes.values.fill_(self.spec.initial)
        return lanes

    def joined(self, old: Lanes, there: Any, pushed: Lanes, keys: Keys) -> Lanes:
        """Return the rows after a push.

        Args:
            old: rows before it; what stands where none was does not count.
            there: an array of bools: which rows there were.
            pushed: a row for each.
            keys: theirs.
        """
        absent = None if there.all() else torch.from_numpy(~there)
        if absent is not None and self.starts:
            old = Lanes(old.values.clone(), None if old.beside is None else old.beside.clone())
            old.put(absent, self.start(keys[~there]))
        if self._apply is not None:
            return Lanes(self._apply(old.values, self.reduction.finish(pushed)).view(old.values.shape))
        joined = self.reduction.join(old, pushed)
        if absent is not None and not self.starts:
            joined.put(absent, pushed.at(absent))
        return joined

    def finished(self, lanes: Lanes, there: Any, keys: Keys) -> Lanes:
        """Return what a reader sees: absent rows as they begin, means divided."""
        if not there.all():
            lanes = Lanes(lanes.values.clone(), lanes.beside)
            lanes.values[torch.from_numpy(~there)] = self.start(keys[~there]).values
        if self.spec.apply:
            return lanes
        return Lanes(self.reduction.finish(lanes), lanes.beside)


class Part(msgspec.Struct, frozen=True):
    """What an entry does to one table."""

    what: str
    table: str
    spec: TableSpec | None
    keys: Keys | None  # None: all rows (call)
    lanes: Lanes | None
    function: str = ""
    arguments: dict[str, Any] = {}


class Entry(msgspec.Struct, frozen=True):
    """One update of one worker in one shard; no parts: the worker has finished `clock` clocks."""

    worker: int
    sequence: int
    clock: int
    parts: list[Part]


class Table:
    """Rows of one table in one shard, with the number of the change that each last saw."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.rows = kind.rows()
        self.changes = 0
        self.stamps = np.zeros(0, dtype=np.int64)
        """By slot."""

    def push(self, keys: Keys, lanes: Lanes) -> None:
        """Join rows, each key given once."""
        slots = self.rows.find(keys)
        there = slots >= 0
        if not there.all():
            slots[~there] = self.rows.add(keys[~there])
        at = torch.from_numpy(slots)
        if there.all() and self.kind.adds:
            self.rows.lanes.values.index_add_(0, at, lanes.values)  # in place: a third of the bytes that others move
            self._stamp(slots)
            return
        self.rows.lanes.put(at, self.kind.joined(self.rows.lanes.at(at), there, lanes, keys))
        self._stamp(slots)

    def begin(self, keys: Keys, lanes: Lanes) -> None:
        """Set those rows that are not there."""
        absent = self.rows.find(keys) < 0
        if absent.any():
            slots = self.rows.add(keys[absent])
            self.rows.lanes.put(torch.from_numpy(slots), lanes.at(torch.from_numpy(absent)))
            self._stamp(slots)

    def call(self, function: Callable[..., Any], keys: Keys | None, arguments: dict[str, Any]) -> None:
        """Replace rows that are there (of these keys, or all) by what the function makes of (keys, values)."""
        slots = np.arange(len(self.rows)) if keys is None else self.rows.find(keys)
        slots = slots[slots >= 0]
        if len(slots):
            at = torch.from_numpy(slots)
            old = self.rows.lanes.values[at]
            self.rows.lanes.values[at] = function(torch.from_numpy(self.rows.keys[slots]), old, **arguments).view(
                old.shape
            )
            self._stamp(slots)

    def read(self, keys: Keys) -> tuple[Any, Lanes, Keys]:
        """Return which rows are there, the rows (anything where none is), and their slots."""
        slots = self.rows.find(keys)
        if not len(self.rows):
            return slots >= 0, self.rows.empty(len(keys)), slots
        return slots >= 0, self.rows.lanes.at(torch.from_numpy(np.maximum(slots, 0))), slots

    def _stamp(self, slots: Keys) -> None:
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
        self.tables: dict[str, Table] = {}
        self.sequences: dict[int, int] = {}
        """The last entry of each worker."""
        self.clocks: dict[int, int] = dict.fromkeys(spec.group, 0)
        self._functions = functions
        self._staged: dict[int, dict[int, list[Part]]] = {}  # clock -> worker -> parts in order

    @property
    def clock(self) -> int:
        """Clocks that all of the group have finished."""
        return min(self.clocks.values(), default=0)

    def table(self, spec: TableSpec) -> Table:
        """Return a table, which is made when it is not there.

        Raises:
            UsageError: it is there and is another; or it cannot be made.
        """
        found = self.tables.get(spec.name)
        if found is None:
            found = self.tables[spec.name] = Table(Kind(spec, self._functions))
        elif found.kind.spec != spec:
            raise differs(found.kind.spec, spec)
        return found

    def apply(self, entry: Entry) -> bool:
        """Take in an entry; False when it was taken in before.

        Raises:
            Exception: what a user's function raised.
        """
        if entry.sequence <= self.sequences.get(entry.worker, -1):
            return False
        self.sequences[entry.worker] = entry.sequence
        if not entry.parts:
            before = self.clock
            if entry.worker in self.clocks:
                self.clocks[entry.worker] = max(entry.clock, self.clocks[entry.worker])
            if self.clock > before:
                self._apply_staged()
            return True
        for part in entry.parts:
            if part.spec is not None:
                self.table(part.spec)
            if part.what == "start":
                assert part.keys is not None
                assert part.lanes is not None
                self.tables[part.table].begin(part.keys, part.lanes)
            elif self.spec.staleness == 0 and entry.worker in self.clocks:
                self._staged.setdefault(entry.clock, {}).setdefault(entry.worker, []).append(part)
            else:
                self._do(part)
        return True

    def _do(self, part: Part) -> None:
        table = self.tables[part.table]
        if part.what == "call":
            table.call(self._functions.function(part.function), part.keys, part.arguments)
        else:
            assert part.keys is not None
            assert part.lanes is not None
            table.push(part.keys, part.lanes)

    def _apply_staged(self) -> None:
        """Apply the clocks that are complete: a clock's pushes joined in the order of ranks, then its calls."""
        for clock in sorted(clock for clock in self._staged if clock < self.clock):
            workers = self._staged.pop(clock)
            parts = [part for worker in sorted(workers) for part in workers[worker]]
            for name in dict.fromkeys(part.table for part in parts):
                pushed = [(part.keys, part.lanes) for part in parts if part.table == name and part.what == "push"]
                if pushed:
                    keys, lanes = merged(self.tables[name].kind.reduction, pushed)
                    self.tables[name].push(keys, lanes)
            for part in parts:
                if part.what == "call":
                    self._do(part)

    # ---- state as bytes ------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return all that this shard knows."""
        tables = [(table.kind.spec, _arrays(table.rows)) for table in self.tables.values()]
        staged = [
            encode_entry(Entry(worker, 0, clock, parts))
            for clock, workers in self._staged.items()
            for worker, parts in workers.items()
        ]
        return _ENCODER.encode(_State(tables, self.sequences, self.clocks, staged))

    def restore(self, data: bytes) -> None:
        """Become what `snapshot` of another said."""
        state = _STATE.decode(data)
        self.tables.clear()
        self._staged.clear()
        for spec, (count, payload) in state.tables:
            table, reader = self.table(spec), Reader(memoryview(payload))
            kind = table.kind
            slots = table.rows.add(reader.keys(count).copy())
            lanes = reader.lanes(count, spec.width, kind.dtype, kind.held_beside)
            table.rows.lanes.put(torch.from_numpy(slots), lanes)
            table._stamp(slots)
        self.sequences, self.clocks = state.sequences, state.clocks
        for each in state.staged:
            entry = decode_entry(each, lambda name: self.tables[name].kind)
            self._staged.setdefault(entry.clock, {})[entry.worker] = entry.parts


def differs(held: TableSpec, asked: TableSpec) -> UsageError:
    """Return the error of who says of a table what was not said before."""
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
    """Return the keys of several pushes, each once and ascending, with their rows joined in the order given.

    Args:
        fold: a push may have a key several times.
    """
    if len(pushed) == 1 and not fold:
        keys, lanes = pushed[0]
        return keys, lanes
    keys = np.concatenate([keys for keys, _ in pushed])
    order = np.argsort(keys, kind="stable")
    unique, groups = np.unique(keys[order], return_inverse=True)
    values = torch.cat([lanes.values for _, lanes in pushed])
    beside = None if pushed[0][1].beside is None else torch.cat([lanes.beside for _, lanes in pushed])
    lanes = Lanes(values, beside).at(torch.from_numpy(order))
    return unique, reduction.fold(lanes, torch.from_numpy(groups), len(unique))


class _State(msgspec.Struct, frozen=True):
    tables: list[tuple[TableSpec, tuple[int, bytes]]]
    sequences: dict[int, int]
    clocks: dict[int, int]
    staged: list[bytes]


class _Part(msgspec.Struct, frozen=True):
    what: str
    table: str
    spec: TableSpec | None
    count: int
    payload: bytes
    function: str
    arguments: dict[str, Any]


class _Entry(msgspec.Struct, frozen=True):
    worker: int
    sequence: int
    clock: int
    parts: list[_Part]


_ENCODER = msgspec.msgpack.Encoder()
_STATE = msgspec.msgpack.Decoder(_State)
_ENTRY = msgspec.msgpack.Decoder(_Entry)


def _arrays(rows: Rows) -> tuple[int, bytes]:
    count = len(rows)
    return count, bytes(pack([rows.keys, *lanes_arrays(rows.lanes.at(slice(0, count)))]))


def encode_entry(entry: Entry) -> bytes:
    """Return an entry as the bytes that go down a chain."""
    parts = []
    for part in entry.parts:
        arrays = [] if part.keys is None else [part.keys]
        arrays += [] if part.lanes is None else lanes_arrays(part.lanes)
        count = -1 if part.keys is None else len(part.keys)
        parts.append(_Part(part.what, part.table, part.spec, count, bytes(pack(arrays)), part.function, part.arguments))
    return _ENCODER.encode(_Entry(entry.worker, entry.sequence, entry.clock, parts))


def decode_entry(data: bytes, kind_of: Callable[[str], Kind]) -> Entry:
    """Return the entry that `encode_entry` made bytes of.

    Args:
        kind_of: the kind of a table that this entry does not make itself.
    """
    found = _ENTRY.decode(data)
    return Entry(found.worker, found.sequence, found.clock, [_part(part, kind_of) for part in found.parts])


def _part(part: _Part, kind_of: Callable[[str], Kind]) -> Part:
    reader = Reader(memoryview(part.payload))
    keys = None if part.count < 0 else reader.keys(part.count)
    lanes = None
    if keys is not None and part.what != "call":
        kind = kind_of(part.table)
        beside = kind.held_beside if part.what == "start" else kind.beside
        lanes = reader.lanes(len(keys), kind.spec.width, kind.dtype, beside)
    return Part(part.what, part.table, part.spec, keys, lanes, part.function, part.arguments)
