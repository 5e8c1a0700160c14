"""Reads an exported table for inference: `psctl.Reader(path)`. The file is mapped, never loaded or changed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.checkpoint.tensorfile import DTYPES, MAX_HEADER, elements
from psctl.errors import UsageError
from psctl.kv import arguments as given
from psctl.kv.table_export import FORMAT
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Array, array_dtype, dtype_named, tensor_from
from psctl.ps.tables.row_index import Keys
from psctl.ps.tables.table_kinds import TableKind, UserFunction
from psctl.types import UNDECODABLE


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file: its bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TableHeader(msgspec.Struct, frozen=True):
    """The header of an exported table."""

    about: dict[str, str] = msgspec.field(name="__metadata__")
    keys: TensorEntry
    rows: TensorEntry


_HEADER = msgspec.json.Decoder(TableHeader)
_SPEC = msgspec.json.Decoder(TableSpec)


class Reader:
    """The rows of a table that `psctl checkpoint export JOB@STEP OUT --table STORE` wrote.

        rows = psctl.Reader("items.safetensors").pull([3, 17])

    The file is mapped read-only: processes of one host share its memory, and a row is loaded when it is first read.
    Keys are found by binary search, those of a call in ascending order. May be used by several threads.

    Args:
        path: the safetensors file.
        initial: a function (keys, width) -> rows for absent keys, where the table was declared with one. Other start
            values are in the file.

    Raises:
        UsageError: there is no such file, it is no exported table, or `initial` is missing.
    """

    def __init__(self, path: str | Path, initial: UserFunction | None = None) -> None:
        self.path = Path(path)
        header, start = self._header()
        try:
            self.spec = _SPEC.decode(header.about.get("table", ""))
        except UNDECODABLE as error:
            raise self._wrong(f"its description: {error}") from error
        self.shape, self.dtype = self.spec.shape, dtype_named(self.spec.dtype)
        if isinstance(self.spec.initial, str) and initial is None:
            raise UsageError(
                f"{self.path}: absent rows are made by the function {self.spec.initial}", "give initial=function"
            )
        self._initial = initial
        plain = replace(
            self.spec, reduce="logical-or", apply="", optimizer=None, admit=None, expire=0, capacity=0,
            initial=None if isinstance(self.spec.initial, str) else self.spec.initial,
        )  # fmt: skip
        self._kind = TableKind(plain, JobFunctions())
        count = header.keys.shape[0] if header.keys.shape else -1
        self._check(header.keys, "I64", (count,))
        self._check(header.rows, DTYPES[self.spec.dtype][0], (count, *self.shape))
        self.keys: Keys = self._mapped(header.keys, start, np.dtype(np.int64))
        """The keys that have a row, ascending."""
        self._rows = self._mapped(header.rows, start, array_dtype(self.dtype)).reshape(count, self.spec.width)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: int) -> bool:
        return bool(self._find(given.integer_keys([key]))[1][0])

    def pull(self, keys: int | Sequence[int] | torch.Tensor | Array) -> torch.Tensor:
        """Return the row of each key; of an absent key its start value.

        Args:
            keys: one, or several in a list, tensor or array.

        Returns:
            A new tensor of shape (n, *row shape), in the order of the keys; for a single key its row.

        Raises:
            UsageError: the keys are no integers of 64 bits.
        """
        wanted = given.checked_key(keys)
        if isinstance(wanted, str):
            raise UsageError(f"key {wanted!r} of an exported table", "give integers, as store.key(text) makes them")
        listed = given.integer_keys([wanted] if isinstance(wanted, int) else wanted)
        unique, inverse = np.unique(listed, return_inverse=True)
        at, present = self._find(unique)
        values = np.empty((len(unique), self.spec.width), dtype=self._rows.dtype)
        values[present] = self._rows[at[present]]
        found = tensor_from(values, self.dtype)
        if not present.all():
            found[torch.from_numpy(~present)] = self._absent(unique[~present])
        rows = found[torch.from_numpy(inverse.reshape(-1))].reshape(-1, *self.shape)
        return rows[0] if isinstance(wanted, int) else rows

    def _find(self, keys: Keys) -> tuple[Keys, Array]:
        """Return the place of each ascending key, and whether it has a row."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=bool)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return at, self.keys[at] == keys

    def _absent(self, keys: Keys) -> torch.Tensor:
        if self._initial is not None:
            return self._initial(torch.from_numpy(keys.copy()), self.spec.width).view(len(keys), self.spec.width)
        return self._kind.initial_rows(keys).values

    def _header(self) -> tuple[TableHeader, int]:
        try:
            with self.path.open("rb") as file:
                size = file.read(8)
                length = struct.unpack("<Q", size)[0] if len(size) == 8 else MAX_HEADER + 1
                data = file.read(length) if length <= MAX_HEADER else b""
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}", "psctl checkpoint export ...") from error
        try:
            header = _HEADER.decode(data)
        except UNDECODABLE as error:
            raise self._wrong("its header") from error
        if header.about.get("format") != FORMAT:
            raise self._wrong("its format")
        return header, 8 + length

    def _check(self, entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> None:
        first, end = entry.data_offsets
        size = elements(shape) * dict(DTYPES.values())[dtype]
        fits = entry.dtype == dtype and entry.shape == shape and min(shape, default=0) >= 0
        if not fits or first < 0 or end - first != size:
            raise self._wrong("its tensors")

    def _mapped(self, entry: TensorEntry, start: int, dtype: np.dtype[np.generic]) -> Array:
        first, end = entry.data_offsets
        if first == end:
            return np.empty(0, dtype=dtype)
        if self.path.stat().st_size < start + end:
            raise self._wrong("its length")
        count = (end - first) // dtype.itemsize
        return np.memmap(self.path, dtype=dtype, mode="r", offset=start + first, shape=(count,))

    def _wrong(self, what: str) -> UsageError:
        hint = "write one: psctl checkpoint export JOB@STEP OUT.safetensors --table STORE"
        return UsageError(f"{self.path} is no exported table: {what} is wrong", hint)
