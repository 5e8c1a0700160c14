"""The safetensors format: its names of dtypes, and the header of a file that is written before its tensors arrive.

A file is 8 bytes with the header's length (little-endian), the header as JSON, and the tensors' bytes without holes. As
sizes are known before the bytes arrive, the header is written first and each part at its own offset. Wider
dtypes lie first, so every tensor starts at a multiple of its element's size. A slice of a tensor is an entry of its
own, named `NAME[start:stop]`; a whole tensor has its plain name and its shape.

The safetensors library writes tensors that are all in memory, so it is no dependency; tests read the files with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.types import TensorSlice

DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's name of a dtype: the format's name, and bytes an element."""

MAX_HEADER = 100_000_000
"""Bytes of header that the format allows."""


def width(dtype: str) -> int:
    """Return bytes an element; UsageError when checkpoints cannot hold that dtype."""
    if dtype not in DTYPES:
        raise errors.UsageError(
            f"a checkpoint cannot hold tensors of dtype {dtype}",
            hint=f"use one of {', '.join(DTYPES)}, or keep it out of run.track",
        )
    return DTYPES[dtype][1]


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of that shape."""
    count = 1
    for side in shape:
        count *= side
    return count


def entry_name(piece: TensorSlice) -> str:
    """Return the name of a slice in its file."""
    whole = piece.start == 0 and piece.stop == elements(piece.shape)
    return piece.name if whole else f"{piece.name}[{piece.start}:{piece.stop}]"


def lay_out(slices: Sequence[TensorSlice], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file (length and header) and the byte offset in the file of each slice.

    Args:
        slices: what the file will hold.
        metadata: plain texts for the header's `__metadata__`.

    Raises:
        UsageError: a dtype that the format lacks.
        CheckpointCorrupt: the sender's fault: a slice that does not lie in its tensor, or two of one name.
    """
    order = sorted(range(len(slices)), key=lambda i: (-width(slices[i].dtype), i))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    places = [0] * len(slices)
    end = 0
    for index in order:
        piece = slices[index]
        name = entry_name(piece)
        if not 0 <= piece.start <= piece.stop <= elements(piece.shape) or min(piece.shape, default=0) < 0:
            raise errors.CheckpointCorrupt(f"{name}: the slice does not lie in a tensor of shape {list(piece.shape)}")
        if name in entries:
            raise errors.CheckpointCorrupt(f"{name}: sent twice by one sender")
        code, itemsize = DTYPES[piece.dtype]
        places[index], end = end, end + (piece.stop - piece.start) * itemsize
        shape = piece.shape if name == piece.name else (piece.stop - piece.start,)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [places[index], end]}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise errors.UsageError(f"{len(slices)} slices are too many for one safetensors file")
    return struct.pack("<Q", len(header)) + header, [8 + len(header) + place for place in places]
