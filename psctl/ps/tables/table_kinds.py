"""What a table is, with its functions in hand: how rows are joined, what absent ones are, what a reader sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from psctl.errors import UsageError
from psctl.ps.pieces import torch_dtype
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Lanes, Reduction
from psctl.ps.tables.row_index import Keys, TableRows

LARGEST = 64 << 20
"""Bytes that a row may have: as many as one message carries."""

SINGLE = 64 << 10
"""Bytes of a row that may wait for others; a larger one is a message of its own."""


class Functions(Protocol):
    """Where reductions and users' functions come from; runtime/ imports them from the job's folder."""

    def reduction(self, name: str) -> Reduction:
        """Return a reduction by its name or module:function."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return a user's function by its module:function."""


class TableKind:
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
        self.row = spec.width * self.dtype.itemsize
        """Bytes of a row."""
        if self.row > LARGEST:
            what = f"a row of shape {list(spec.shape)} has {self.row} bytes, more than {LARGEST}"
            raise UsageError(what, "push large tensors under a name: those are cut into blocks")
        self.may_wait = 0 < self.row <= SINGLE and spec.blocks == 1
        """Rows that are pushed one by one may leave together (single_key_batches.py)."""
        self.joins_values = not self.beside and not spec.reduce.startswith("logical")
        """What is pushed is joined as it is."""
        self.adds = spec.reduce == "sum" and not spec.apply

    def rows(self) -> TableRows:
        """Return an empty table."""
        return TableRows(self.spec.width, self.dtype, self.held_beside)

    def read_buffer(self, count: int) -> Lanes:
        """Return memory for so many rows of a reader; of those that are not there the values are anything."""
        beside = torch.zeros(count, self.held_beside, dtype=torch.int64) if self.held_beside else None
        return Lanes(torch.empty(count, self.spec.width, dtype=self.dtype), beside)

    def push_buffer(self, count: int) -> Lanes:
        """Return memory for so many rows that are pushed."""
        beside = torch.zeros(count, self.beside, dtype=torch.int64) if self.beside else None
        return Lanes(torch.empty(count, self.spec.width, dtype=self.dtype), beside)

    def initial_rows(self, keys: Keys) -> Lanes:
        """Return what absent rows are."""
        lanes = TableRows(self.spec.width, self.dtype, self.held_beside).empty(len(keys))
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
            old.put(absent, self.initial_rows(keys[~there]))
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
            lanes.values[torch.from_numpy(~there)] = self.initial_rows(keys[~there]).values
        if self.spec.apply:
            return lanes
        return Lanes(self.reduction.finish(lanes), lanes.beside)
