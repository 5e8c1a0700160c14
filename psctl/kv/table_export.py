"""Exports the rows of integer keys of a store in a checkpoint: one file, sorted by key.

A safetensors file has `keys` (int64, ascending) and `rows`, and the table's description in its metadata, which
table_reader.py reads. Keys are in memory; rows are copied in chunks from the mapped files of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import Disk, writing
from psctl.checkpoint.manifest import Manifest, StoredSlice, slices_by_name
from psctl.checkpoint.writer import partial_path, remove_abandoned_for
from psctl.errors import CheckpointCorrupt, UsageError
from psctl.kv.parquet_file import write_parquet
from psctl.ps.table_messages import TableSpec
from psctl.ps.tables.reductions import Array, Lanes, array_dtype, array_of, dtype_named, reductions, tensor_from
from psctl.ps.tables.row_changes import newest_rows
from psctl.ps.tables.row_index import NO_KEYS, Keys
from psctl.ps.tables.server.saved_names import ROOT, find_parts
from psctl.ps.tables.server.saved_tables import decode_about, row_set
from psctl.types import TensorSlice

FORMAT = "psctl table"
"""The value of `format` in the metadata of an exported table."""

CHUNK_BYTES = 16 << 20
"""Bytes of rows that are gathered at once."""

PARQUET = ".parquet"


class SavedRows:
    """The rows of integer keys of a store in a verified checkpoint, in the order of their keys.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        store: the store's name.

    Raises:
        UsageError: the checkpoint has no such store, or the store no integer keys.
        CheckpointCorrupt: the store's description contradicts itself.
    """

    def __init__(self, folder: Path, manifest: Manifest, store: str) -> None:
        self._folder, self._slices = folder, slices_by_name(manifest.files)
        places = [place for place in find_parts(self._slices) if place.store == quote(store, safe="")]
        if not places:
            stores = sorted({name.split("/")[1] for name in self._slices if name.startswith(ROOT)})
            known = f"it has: {', '.join(stores)}" if stores else "it has none"
            raise UsageError(f"{manifest.id} has no store {store!r}; {known}", "--table STORE", where=manifest.id)
        names = [f"{place.prefix}about" for place in places]
        abouts = [decode_about(bytes(self._bytes(name)), name) for name in names]
        specs = [spec for about in abouts for spec in about.tables if not spec.name]
        if not specs:
            raise UsageError(f"store {store!r} of {manifest.id} has no rows of integer keys", where=manifest.id)
        self.spec: TableSpec = specs[0]
        self._dtype = dtype_named(self.spec.dtype)
        self._parts: list[str] = []
        found: list[tuple[Keys, Keys, Keys]] = [(NO_KEYS, NO_KEYS, NO_KEYS)]  # keys, their part, their place in it
        for _, chain in groupby(zip(places, abouts, strict=True), key=lambda each: each[0].hashes):
            parts = list(chain)
            names = [f"{place.prefix}integers/{of}" for place, _ in parts for of in ("keys", "removed")]
            listed = {name: self._array(name, np.int64) for name in names if name in self._slices}
            sets = [row_set(listed, place, about, "") for place, about in parts]
            for (place, _), rows, at in zip(parts, sets, newest_rows(sets), strict=True):
                if len(at):
                    found.append((rows.keys[at], np.full(len(at), len(self._parts)), at))
                    self._parts.append(f"{place.prefix}integers")
        joined, part, at = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(joined)
        self.keys: Keys = joined[order]
        self._part, self._at = part[order], at[order]

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the rows, as a reader receives them, in the order of `keys`."""
        width, dtype = self.spec.width, array_dtype(self._dtype)
        rows = [self._array(f"{part}/rows", dtype).reshape(-1, width) for part in self._parts]
        extra = [self._array(f"{part}/beside", np.int64) for part in self._parts if f"{part}/beside" in self._slices]
        step = max(1, CHUNK_BYTES // max(1, width * dtype.itemsize))
        for start in range(0, len(self.keys), step):
            part, at = self._part[start : start + step], self._at[start : start + step]
            values = tensor_from(_gathered(rows, part, at), self._dtype)
            if extra and self.spec.reduce == "mean":
                counts = [each.reshape(-1, 1) for each in extra]
                lanes = Lanes(values, torch.from_numpy(_gathered(counts, part, at)))
                values = reductions()["mean"].finish(lanes)
            yield values

    def _bytes(self, name: str) -> Array:
        (file, piece), *more = self._slices[name]
        if more or not _is_whole(piece):
            raise CheckpointCorrupt(f"{name} is in several parts, where a server writes it as one")
        if not piece.size:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self._folder / file, dtype=np.uint8, mode="r", offset=piece.offset, shape=(piece.size,))

    def _array(self, name: str, dtype: np.dtype[np.generic] | type[np.generic]) -> Array:
        found: Array = self._bytes(name).view(dtype)
        return found


def _is_whole(piece: StoredSlice) -> bool:
    return piece.start == 0 and piece.stop == tensorfile.elements(piece.shape)


def _gathered(arrays: list[Array], part: Keys, at: Keys) -> Array:
    """Return rows of several arrays: of array part[i] its row at[i]."""
    found = np.empty((len(part), arrays[0].shape[1]), dtype=arrays[0].dtype)
    for number, array in enumerate(arrays):
        mine = np.flatnonzero(part == number)
        found[mine] = array[at[mine]]
    return found


def export_table(folder: Path, manifest: Manifest, store: str, out: Path) -> tuple[int, int]:
    """Write the rows of integer keys of a store; return the number of rows, and the file's bytes.

    Args:
        folder, manifest, store: as SavedRows.
        out: the new file, *.parquet or a safetensors file; one of that name is replaced at the end.

    Raises:
        UsageError, CheckpointCorrupt: as SavedRows; or pyarrow is not installed.
        DiskFull: the disk refused; `out` is as it was.
    """
    rows, disk = SavedRows(folder, manifest, store), Disk()
    about = {"format": FORMAT, "psctl": manifest.id, "store": store, "table": msgspec.json.encode(rows.spec).decode()}
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_for(out)
    partial = partial_path(out)
    try:
        if out.suffix == PARQUET:
            with writing(partial):
                write_parquet(partial, rows.keys, rows.chunks(), about)
        else:
            _write_tensors(disk, partial, rows, about)
        disk.rename(partial, out)
    except BaseException:
        with writing(partial):
            partial.unlink(missing_ok=True)
        raise
    return len(rows.keys), out.stat().st_size


def _write_tensors(disk: Disk, partial: Path, rows: SavedRows, about: dict[str, str]) -> None:
    spec, count = rows.spec, len(rows.keys)
    targets = [
        TensorSlice("keys", "int64", (count,), 0, count),
        TensorSlice("rows", spec.dtype, (count, *spec.shape), 0, count * spec.width),
    ]
    header, (keys_at, rows_at) = tensorfile.lay_out(targets, about)
    partial.unlink(missing_ok=True)
    descriptor = disk.create(partial)
    try:
        disk.write(partial, descriptor, memoryview(header), 0)
        disk.write(partial, descriptor, memoryview(rows.keys.tobytes()), keys_at)
        for chunk in rows.chunks():
            data = array_of(chunk).tobytes()
            disk.write(partial, descriptor, memoryview(data), rows_at)
            rows_at += len(data)
        disk.sync(partial, descriptor)
    finally:
        os.close(descriptor)
