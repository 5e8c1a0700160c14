"""Reductions: commutative monoids on rows of tensors, which combine pushes to a key into one value.

A value is sent and stored as *lanes*: rows of the key's dtype and, for some reductions, extra integers: mean counts its
contributions, argmin has the index of the least value. schedule/operations.py has the same operations on Python's
numbers; a test compares the two. `join` combines the rows of two tensors pairwise and changes neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from psctl.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]
"""Any: the type of its elements is that of a table, which is known at run time."""

ArrayType: TypeAlias = np.dtype[Any]
"""Of the elements of an Array. Any: as there."""


class Lanes(NamedTuple):
    """Rows of values (rows, width), and their extra integers (mean: one a row; argmin: one an element), or None."""

    values: torch.Tensor
    extra: torch.Tensor | None = None

    def copy(self) -> Lanes:
        """Return a copy in memory of its own."""
        return Lanes(self.values.clone(), None if self.extra is None else self.extra.clone())

    def at(self, rows: torch.Tensor | slice) -> Lanes:
        """Return these rows: a copy when `rows` is a tensor, a view when it is a slice."""
        if isinstance(rows, torch.Tensor) and rows.dtype == torch.int64:  # a seventh of the time of indexing
            extra = None if self.extra is None else self.extra.index_select(0, rows)
            return Lanes(self.values.index_select(0, rows), extra)
        return Lanes(self.values[rows], None if self.extra is None else self.extra[rows])

    def put(self, rows: torch.Tensor, other: Lanes) -> None:
        """Overwrite these rows."""
        _write(self.values, rows, other.values)
        if self.extra is not None:
            assert other.extra is not None, "lanes of one reduction"
            _write(self.extra, rows, other.extra)


def _write(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite rows; numpy does it three times as fast as torch."""
    array_of(into)[rows.numpy()] = array_of(values.detach())


_SAME = {getattr(torch, name): np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64", "bool",
                                                           "float16", "float32", "float64")}  # fmt: skip
DTYPES = (*_SAME, torch.bfloat16)
"""Types of values that a store accepts: those that torch adds, compares and copies on CPUs."""

_BY_NAME: dict[str, torch.dtype] = {str(dtype)[6:]: dtype for dtype in DTYPES}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name without "torch.".

    Raises:
        UsageError: a store does not accept it.
    """
    if name not in _BY_NAME:
        raise UsageError(f"a store does not accept {name}", f"convert it first to one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size, for types that numpy lacks


def array_of(values: torch.Tensor) -> Array:
    """Return a tensor's memory as an array, to copy rows: numpy's calls cost a tenth of torch's.

    Its type is that of the values if numpy has it (it has no bfloat16), else an integer type of the same size.
    """
    found: Array = (values if values.dtype in _SAME else values.view(_WORDS[values.dtype.itemsize])).numpy()
    return found


def array_dtype(dtype: torch.dtype) -> ArrayType:
    """Return the array type that `array_of` uses for values of `dtype`."""
    return _SAME.get(dtype) or _SAME[_WORDS[dtype.itemsize]]


def tensor_from(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of this memory: the inverse of `array_of`."""
    values = torch.from_numpy(array)
    return values if dtype in _SAME else values.view(dtype)


Join = Callable[[Lanes, Lanes], Lanes]


class Reduction(msgspec.Struct, frozen=True):
    """A commutative monoid on rows.

    Args:
        name: as users write it: sum, max ..., or module:function.
        join: combines rows pairwise.
        accepts: kinds of dtype: f(loating), i(nteger), b(ool).
        extra: the extra integers: none, "count" (one a row) or "index" (one an element).
    """

    name: str
    join: Join
    accepts: str = "fi"
    extra: Literal["", "count", "index"] = ""

    def check(self, dtype: torch.dtype) -> None:
        """Check that the reduction accepts a dtype.

        Raises:
            UsageError: it does not.
        """
        kind = "f" if dtype.is_floating_point else "b" if dtype is torch.bool else "i"
        dtype_named(str(dtype)[6:])
        if kind not in self.accepts:
            names = {"f": "floating point", "i": "integer", "b": "bool"}
            accepted = ", ".join(names[each] for each in self.accepts)
            raise UsageError(f"reduce={self.name!r} does not accept {str(dtype)[6:]}", f"use one of: {accepted}")

    def width(self, elements: int) -> int:
        """Return how many extra integers a row of `elements` elements has."""
        return {"": 0, "count": 1, "index": elements}[self.extra]

    def lanes(self, values: torch.Tensor, index: torch.Tensor | None = None) -> Lanes:
        """Return a push's contribution: its rows, flat, with their extra integers."""
        if self.name.startswith("logical"):
            values = (values != 0).to(values.dtype)
        if self.extra == "count":
            return Lanes(values, torch.ones(len(values), 1, dtype=torch.int64))
        if self.extra == "index":
            assert index is not None, "checked by the caller"
            return Lanes(values, index)
        return Lanes(values)

    def finish(self, lanes: Lanes) -> torch.Tensor:
        """Return the values that a reader receives."""
        if self.extra == "count" and lanes.extra is not None:
            return lanes.values / lanes.extra.clamp(min=1).to(lanes.values.dtype)
        return lanes.values

    def fold(self, lanes: Lanes, groups: torch.Tensor, count: int) -> Lanes:
        """Return `count` rows: those of each group combined, pairwise and always in the same order.

        Args:
            lanes: the rows.
            groups: the number of each row's group, ascending; every group from 0 to count-1 has a row.
        """
        if len(groups) == count:
            return lanes
        if self.name == "sum":
            sums = torch.zeros(count, *lanes.values.shape[1:], dtype=lanes.values.dtype)
            return Lanes(sums.index_add_(0, groups, lanes.values))
        while len(groups) > count:
            starts = torch.searchsorted(groups, groups)
            second = (torch.arange(len(groups)) - starts) % 2 == 1
            right = second.nonzero().squeeze(1)
            joined = self.join(lanes.at(right - 1), lanes.at(right))
            lanes = lanes.copy()
            lanes.put(right - 1, joined)
            lanes, groups = lanes.at(~second), groups[~second]
        return lanes


def reductions() -> dict[str, Reduction]:
    """Return all reductions by name."""
    found = (
        Reduction("sum", _on_values(torch.add)),
        Reduction("mean", _mean, "f", "count"),
        Reduction("prod", _on_values(torch.mul)),
        Reduction("min", _on_values(_least)),
        Reduction("max", _on_values(_largest)),
        Reduction("logical-and", _logical(torch.logical_and), "fib"),
        Reduction("logical-or", _logical(torch.logical_or), "fib"),
        Reduction("logical-xor", _logical(torch.logical_xor), "fib"),
        Reduction("bitwise-and", _on_values(torch.bitwise_and), "ib"),
        Reduction("bitwise-or", _on_values(torch.bitwise_or), "ib"),
        Reduction("bitwise-xor", _on_values(torch.bitwise_xor), "ib"),
        Reduction("logsumexp", _on_values(torch.logaddexp), "f"),
        Reduction("argmin", _argmin, "fi", "index"),
    )
    return {one.name: one for one in found}


def custom(name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Reduction:
    """Return the reduction of a user's own function of two tensors of rows."""
    return Reduction(name, _on_values(function), "fib")


def _on_values(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Join:
    return lambda one, other: Lanes(function(one.values, other.values))


def _logical(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Join:
    return lambda one, other: Lanes(function(one.values, other.values).to(one.values.dtype))


def _mean(one: Lanes, other: Lanes) -> Lanes:
    assert one.extra is not None
    assert other.extra is not None
    return Lanes(one.values + other.values, one.extra + other.extra)


def _least(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the minimum: NaN if either is NaN; -0.0 is below 0.0, so that the order of arguments never matters."""
    if not one.is_floating_point():
        return torch.minimum(one, other)
    return torch.where(one == other, torch.where(one.signbit(), one, other), torch.minimum(one, other))


def _largest(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not one.is_floating_point():
        return torch.maximum(one, other)
    return torch.where(one == other, torch.where(one.signbit(), other, one), torch.maximum(one, other))


def _argmin(one: Lanes, other: Lanes) -> Lanes:
    """Return the smaller value with its index; of equal values the lower index; NaN counts as the smallest."""
    assert one.extra is not None
    assert other.extra is not None
    blank, other_blank = one.values.isnan(), other.values.isnan()
    tie = torch.where(blank | other_blank, blank & other_blank, one.values == other.values)
    before = torch.where(blank != other_blank, blank, one.values < other.values)
    first = torch.where(tie, one.extra <= other.extra, before)
    return Lanes(torch.where(first, one.values, other.values), torch.where(first, one.extra, other.extra))
