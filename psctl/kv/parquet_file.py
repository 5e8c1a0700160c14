"""Writes an exported table as a parquet file, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from psctl.errors import UsageError
from psctl.ps.tables.row_index import Keys


def write_parquet(path: Path, keys: Keys, chunks: Iterator[torch.Tensor], about: Mapping[str, str]) -> None:
    """Write the columns `key` and `row` (a list of fixed size); 16-bit brain floats become float32.

    Args:
        path: the new file.
        keys: ascending.
        chunks: the rows, in their order.
        about: texts for the file's metadata.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        hint = 'pip install "psctl[parquet]", or export to .safetensors'
        raise UsageError("a .parquet file needs pyarrow", hint) from error
    writer, at = None, 0
    try:
        for chunk in chunks:
            flat = chunk.float() if chunk.dtype is torch.bfloat16 else chunk
            rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat.reshape(-1).numpy()), chunk.shape[1])
            key = pyarrow.array(keys[at : at + len(chunk)])
            at += len(chunk)
            table = pyarrow.table({"key": key, "row": rows}).replace_schema_metadata(dict(about))
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
        if writer is None:
            empty = pyarrow.table({"key": pyarrow.array([], pyarrow.int64())}).replace_schema_metadata(dict(about))
            parquet.write_table(empty, path)
    finally:
        if writer is not None:
            writer.close()
