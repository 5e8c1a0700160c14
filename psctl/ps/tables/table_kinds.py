"""A table's description with its functions: how rows are combined, what absent rows are, what a reader receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import Initialiser, StoreSpec, TableSpec
from psctl.ps.tables.reductions import Array, Lanes, Reduction, dtype_named
from psctl.ps.tables.row_filters import FilterChain, RowFilter
from psctl.ps.tables.row_index import Keys, TableRows
from psctl.ps.tables.row_initialisers import initial_values
from psctl.ps.tables.row_optimizers import RowOptimizer, rule_named

LARGEST = 64 << 20
"""Largest row in bytes: as many as one message carries."""

LARGEST_BATCHED = 64 << 10
"""Largest row in bytes that is batched with others; a larger one is sent in a message of its own."""


KEY_BYTES = 32
"""Most bytes of a key, its place in the index, and the number of its last use."""

UserFunction: TypeAlias = Callable[..., torch.Tensor]
"""A user's function of rows; its parameters depend on its use: `apply`, `initial` or `Store.call`."""


class Functions(Protocol):
    """Provides reductions and users' functions; process.user_functions imports them from the job's folder."""

    def reduction(self, name: str) -> Reduction:
        """Return a reduction by its name or module:function."""

    def function(self, name: str) -> UserFunction:
        """Return a user's function by its module:function."""

    def row_filter(self, name: str) -> type[RowFilter]:
        """Return a user's filter by its module:class."""


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
        self.optimizer = _optimizer(spec, self.dtype)
        self.updates = bool(spec.apply) or self.optimizer is not None
        """Whether a function or an optimizer makes the new row of the pushes."""
        self.stored_extra = 0 if self.updates else self.extra
        self._apply = functions.function(spec.apply) if spec.apply else None
        self._initial = functions.function(spec.initial) if isinstance(spec.initial, str) else None
        self.has_initial = spec.initial is not None or self.updates
        """Whether a push to an absent row is combined with an initial value."""
        self.row_bytes = spec.width * self.dtype.itemsize
        if self.row_bytes > LARGEST:
            what = f"a row of shape {list(spec.shape)} has {self.row_bytes} bytes, more than {LARGEST}"
            raise UsageError(what, "push a large tensor under a name: it is stored in blocks")
        self.filters = FilterChain(spec, self.dtype, functions) if spec.filters else None
        """The filters of pushed rows, with a state of their own; None: all rows are sent as they are."""
        single = spec.blocks == 1 and self.filters is None
        self.batchable = 0 < self.row_bytes <= LARGEST_BATCHED and single
        """Whether rows that are pushed one by one may be batched (single_key_batches.py)."""
        self.stores_values_unchanged = not self.extra and not spec.reduce.startswith("logical")
        """Whether pushed values are combined without conversion."""
        self.only_sums = spec.reduce == "sum" and not self.updates
        """Whether a push to an existing row adds to it, and does nothing else."""
        self.workers_apply = self.optimizer is None and spec.admit is None
        """Whether a worker can apply its own pushes to rows that it has read: the state of optimizers is on servers."""
        self.removes = bool(spec.expire or spec.capacity)
        """Whether rows may leave the table."""
        state = 0 if self.optimizer is None else self.optimizer.state_width * self.optimizer.state_dtype.itemsize
        self.row_cost = self.row_bytes + 8 * self.stored_extra + state + KEY_BYTES
        """Bytes of a row with all that is kept for it."""
        _check_retention(spec)

    def rows(self, state: Callable[[int], torch.Tensor] | None = None) -> TableRows:
        """Return an empty table; `state` makes the optimizer's state of new rows."""
        return TableRows(self.spec.width, self.dtype, self.stored_extra, state)

    def buffer(self, count: int, extra: int) -> Lanes:
        """Return memory for `count` rows with `extra` integers each; the values are undefined."""
        integers = torch.zeros(count, extra, dtype=torch.int64) if extra else None
        return Lanes(torch.empty(count, self.spec.width, dtype=self.dtype), integers)

    def initial_rows(self, keys: Keys) -> Lanes:
        """Return the initial values of absent rows."""
        lanes = self.rows().zeros(len(keys))
        if self._initial is not None:
            lanes.values.copy_(self._initial(torch.from_numpy(keys.copy()), self.spec.width).view(lanes.values.shape))
        elif isinstance(self.spec.initial, Initialiser):
            made = initial_values(self.spec.initial, keys, self.spec.width)
            lanes.values.copy_(torch.from_numpy(made))
        elif isinstance(self.spec.initial, int | float):
            lanes.values.fill_(self.spec.initial)
        return lanes

    def after_push(self, old: Lanes, present: Array, pushed: Lanes, keys: Keys) -> Lanes:
        """Return the rows after a push.

        Args:
            old: the rows before; values of absent rows are ignored.
            present: bools: which rows existed.
            pushed: the pushed rows, one for each.
            keys: the keys of the rows.
        """
        absent = None if present.all() else torch.from_numpy(~present)
        if absent is not None and self.has_initial:
            old = old.copy()
            old.put(absent, self.initial_rows(keys[~present]))
        if self._apply is not None:
            return Lanes(self._apply(old.values, self.reduction.finish(pushed)).view(old.values.shape))
        assert self.optimizer is None, "an optimizer needs the state of the rows"
        joined = self.reduction.join(old, pushed)
        if absent is not None and not self.has_initial:
            joined.put(absent, pushed.at(absent))
        return joined

    def as_read(self, lanes: Lanes, present: Array, keys: Keys) -> Lanes:
        """Return the rows that a reader receives: initial values for absent rows, means divided by their counts."""
        if not present.all():
            lanes = Lanes(lanes.values.clone(), lanes.extra)
            lanes.values[torch.from_numpy(~present)] = self.initial_rows(keys[~present]).values
        if self.updates:
            return lanes
        return Lanes(self.reduction.finish(lanes), lanes.extra)


def _optimizer(spec: TableSpec, dtype: torch.dtype) -> RowOptimizer | None:
    if spec.optimizer is None:
        return None
    name = spec.optimizer.name
    if not dtype.is_floating_point:
        raise UsageError(f"optimizer {name!r} of rows of {spec.dtype}", "declare a floating-point dtype")
    if spec.apply:
        raise UsageError(f"optimizer {name!r} and apply={spec.apply!r}", "give one of them: both update the rows")
    if spec.reduce not in ("sum", "mean"):
        raise UsageError(f"optimizer {name!r} with reduce={spec.reduce!r}", 'gradients are combined by "sum" or "mean"')
    if spec.name and name == "rowwise-adagrad":
        raise UsageError(f"optimizer {name!r} for key {spec.name!r}", "use adagrad: a tensor has no rows")
    if not rule_named(name).keeps_initial and spec.initial not in (None, 0.0):
        raise UsageError(
            f"optimizer {name!r} with initial={spec.initial!r}: it makes rows of sums of gradients alone",
            "declare the rows without an initial value",
        )
    return RowOptimizer(spec.optimizer, spec.width, dtype)


def _check_retention(spec: TableSpec) -> None:
    given = [name for name in ("admit", "expire", "capacity") if getattr(spec, name)]
    if spec.name and spec.filters:
        raise UsageError(f"filters= for key {spec.name!r}", "only rows of integer keys are filtered")
    if spec.name and given:
        raise UsageError(f"{given[0]}= for key {spec.name!r}", "only rows of integer keys are admitted and removed")


def check_table(store: StoreSpec, spec: TableSpec) -> None:
    """Check that a table fits its store.

    Raises:
        UsageError: the store has no clocks by which rows expire, no joint steps that mark rows for a filter, or sends
            rows that change, which may not leave.
    """
    if spec.expire and store.staleness is None:
        raise UsageError(
            f"expire={spec.expire} clocks in an asp store, which has no clocks", "use capacity=, or bsp or ssp"
        )
    if store.staleness != 0 and any(each.name == "kkt" for each in spec.filters):
        raise UsageError(
            'filter "kkt" in a store that is not bsp: each push is a step of one worker\'s gradient alone',
            'open the store with consistency="bsp", where a step has the joint gradient',
        )
    if store.eager and (spec.expire or spec.capacity):
        raise UsageError('a table whose rows may leave, in a store with reads="eager"', 'open it with reads="lazy"')
