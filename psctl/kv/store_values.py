"""What a script gives and gets of a store, and what travels: keys, tensors, rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch

from psctl.errors import UsageError
from psctl.kv.argument_checks import checked_spec, tensor_of
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.table_kinds import Kind

Key: TypeAlias = "str | int | range | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]"
"""A name; or integer keys: one, a range, or several in a list, tensor or array."""

Value: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[Any] | float | tuple[Any, Any]"
"""A tensor, or what makes one; for argmin (values, indices)."""


def hashed(text: str) -> int:
    """Return a 64-bit integer key for a text; two texts with the same are not to be expected (2^32 texts: one in 2)."""
    if not isinstance(text, str):
        raise UsageError(f"store.key({text!r})", "give a text: store.key(str(thing))")
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little", signed=True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def inferred(key: Key, value: Value, reduce: str) -> TableSpec:
    """Return what a table is that nobody has declared, from what is pushed to it first."""
    values = tensor_of(value[0] if reduce == "argmin" and isinstance(value, tuple) else value)
    name = key if isinstance(key, str) else ""
    shape = values.shape if isinstance(key, str | int) else values.shape[1:]
    return checked_spec(TableSpec(name, tuple(shape), dtype_name(values.dtype), reduce))


def rows_of(kind: Kind, key: Key, value: Value, count: int) -> Lanes:
    """Return what a push contributes, a row a key (or block): the script's own memory, where it lies as it should.

    Args:
        count: how many keys.

    Raises:
        UsageError: the value does not fit the table; the script's fault.
    """
    spec = kind.spec
    index = None
    if kind.reduction.beside == "index":
        if not isinstance(value, tuple) or len(value) != 2:
            raise UsageError(f"a push to {says(spec)} gives no indices", "push (values, indices) with reduce='argmin'")
        given = tensor_of(value[1])
        if given.is_floating_point() or given.is_complex():
            raise UsageError(f"indices of {dtype_name(given.dtype)}", "push indices of int64: (values, indices)")
        index = _laid(spec, key, given.to(torch.int64), count)
        value = value[0]
    values = tensor_of(value)
    if values.dtype != kind.dtype:
        if torch.result_type(values, torch.zeros(1, dtype=kind.dtype)) != kind.dtype:
            raise UsageError(
                f"{dtype_name(values.dtype)} is pushed to {says(spec)}, which holds {spec.dtype}", "convert it first"
            )
        values = values.to(kind.dtype)
    return kind.reduction.lanes(_laid(spec, key, values, count), index)


def _laid(spec: TableSpec, key: Key, values: torch.Tensor, count: int) -> torch.Tensor:
    """Lay a value out as rows."""
    wanted = spec.shape if isinstance(key, str | int) else (count, *spec.shape)
    if values.ndim == 0 and wanted:
        values = values.expand(wanted)
    if tuple(values.shape) != wanted:
        raise UsageError(f"{tuple(values.shape)} is pushed to {says(spec)} where {wanted} fits", "reshape it")
    if not isinstance(key, str):
        return values.reshape(count, spec.width)
    flat = values.reshape(-1)
    if spec.blocks * spec.width > spec.elements:
        flat = torch.cat([flat, torch.zeros(spec.blocks * spec.width - spec.elements, dtype=flat.dtype)])
    return flat.view(spec.blocks, spec.width)


def given_back(kind: Kind, key: Key, lanes: Lanes) -> Any:
    """Return rows as the script gets them: a tensor; for argmin (values, indices)."""
    found = _shaped(kind.spec, key, lanes.values)
    if kind.reduction.beside == "index" and lanes.beside is not None:
        return found, _shaped(kind.spec, key, lanes.beside)
    return found


def _shaped(spec: TableSpec, key: Key, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(key, str):
        return rows.reshape(-1)[: spec.elements].reshape(spec.shape)
    if isinstance(key, int):
        return rows.reshape(spec.shape)
    return rows.reshape(len(rows), *spec.shape)


def says(spec: TableSpec) -> str:
    """Return a table in words."""
    return f"key {spec.name!r} of shape {spec.shape}" if spec.name else f"integer keys, rows of shape {spec.shape}"


def many(key: Any) -> bool:
    """Is this a group of keys: a list or tuple of names, or a dict?"""
    return isinstance(key, Mapping) or (
        isinstance(key, list | tuple) and bool(key) and all(isinstance(one, str) for one in key)
    )


def in_words(key: Any) -> str:
    """Return a key, or how many, in words."""
    if isinstance(key, str | int | range):
        return repr(key) if len(str(key)) <= 60 else f"{str(key)[:60]!r}..."
    if many(key):
        return f"{len(key)} names"
    return f"{len(key)} keys" if hasattr(key, "__len__") else repr(key)
