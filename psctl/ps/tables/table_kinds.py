"""A table's description with its functions: how rows are combined, what absent rows are, what a reader receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Lanes, Reduction, dtype_named
from psctl.ps.tables.row_index import Keys, TableRows

LARGEST = 64 << 20
"""Largest row in bytes: as many as one message carries."""

SINGLE = 64 << 10
"""Largest row in bytes that is batched with others; a larger one is sent in a message of its own."""


class Functions(Protocol):
    """Provides reductions and users' functions; process.user_functions imports them from the job's folder."""

    def reduction(self, name: str) -> Reduction:
        """Return a reduction by its name or module:function."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return a user's function by its module:function."""


class TableKind:
    """A table's spec with its functions.

    Raises:
        UsageError: the spec is invalid, or names a function that cannot be imported.
    """

    def __init__(self, spec: TableSpec, functions: Functions) -> None:
        self.spec = spec
        self.dtype = dtype_named(spec.dtype)
        self.reduction = functions.reduction(spec.reduce)
        self.reduction.check(self.dtype)
        self.extra = self.reduction.width(spec.width)
        self.held_extra = 0 if spec.apply else self.extra
        self._apply = functions.function(spec.apply) if spec.apply else None
        self._initial = functions.function(spec.initial) if isinstance(spec.initial, str) else None
        self.starts = spec.initial is not None or bool(spec.apply)
        """Whether a push to an absent row is combined with an initial value."""
        self.row = spec.width * self.dtype.itemsize
        """Bytes of a row."""
        if self.row > LARGEST:
            what = f"a row of shape {list(spec.shape)} has {self.row} bytes, more than {LARGEST}"
            raise UsageError(what, "push large tensors under a name: those are cut into blocks")
        self.may_wait = 0 < self.row <= SINGLE and spec.blocks == 1
        """Whether rows that are pushed one by one may be batched (single_key_batches.py)."""
        self.joins_values = not self.extra and not spec.reduce.startswith("logical")
        """Whether pushed values are combined as they are, without conversion."""
        self.adds = spec.reduce == "sum" and not spec.apply

    def rows(self) -> TableRows:
        """Return an empty table."""
        return TableRows(self.spec.width, self.dtype, self.held_extra)

    def read_buffer(self, count: int) -> Lanes:
        """Return memory for `count` rows of a read; values of absent rows are undefined."""
        extra = torch.zeros(count, self.held_extra, dtype=torch.int64) if self.held_extra else None
        return Lanes(torch.empty(count, self.spec.width, dtype=self.dtype), extra)

    def push_buffer(self, count: int) -> Lanes:
        """Return memory for `count` rows of a push."""
        extra = torch.zeros(count, self.extra, dtype=torch.int64) if self.extra else None
        return Lanes(torch.empty(count, self.spec.width, dtype=self.dtype), extra)

    def initial_rows(self, keys: Keys) -> Lanes:
        """Return the initial values of absent rows."""
        lanes = TableRows(self.spec.width, self.dtype, self.held_extra).empty(len(keys))
        if self._initial is not None:
            lanes.values.copy_(self._initial(torch.from_numpy(keys.copy()), self.spec.width).view(lanes.values.shape))
        elif isinstance(self.spec.initial, int | float):
            lanes.values.fill_(self.spec.initial)
        return lanes

    def joined(self, old: Lanes, there: Any, pushed: Lanes, keys: Keys) -> Lanes:
        """Return the rows after a push.

        Args:
            old: the rows before; values of absent rows are ignored.
            there: an array of bools: which rows existed.
            pushed: the pushed rows, one for each.
            keys: the keys of the rows.
        """
        absent = None if there.all() else torch.from_numpy(~there)
        if absent is not None and self.starts:
            old = Lanes(old.values.clone(), None if old.extra is None else old.extra.clone())
            old.put(absent, self.initial_rows(keys[~there]))
        if self._apply is not None:
            return Lanes(self._apply(old.values, self.reduction.finish(pushed)).view(old.values.shape))
        joined = self.reduction.join(old, pushed)
        if absent is not None and not self.starts:
            joined.put(absent, pushed.at(absent))
        return joined

    def finished(self, lanes: Lanes, there: Any, keys: Keys) -> Lanes:
        """Return the rows that a reader receives: initial values for absent rows, means divided."""
        if not there.all():
            lanes = Lanes(lanes.values.clone(), lanes.extra)
            lanes.values[torch.from_numpy(~there)] = self.initial_rows(keys[~there]).values
        if self.spec.apply:
            return lanes
        return Lanes(self.reduction.finish(lanes), lanes.extra)
