"""Encoding of keys and rows as the bytes of one payload.

A payload is a sequence of arrays, each padded to eight bytes so that it can be read in place. The message's sections,
in their order, determine the arrays:

    UpdateSection   keys (unless by digest), sequences (if numbered), extra integers of the rows, values;
                    of a call: keys only
    ReadSection     keys (unless by digest, or a range)
    AnswerSection   keys (if `keys` is set), which rows exist (a byte each), extra integers, values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from psctl.errors import ProtocolError
from psctl.ps.tables.reductions import Array, Lanes, array_dtype, tensor_from
from psctl.ps.tables.row_index import Keys

HASHED = 32
"""Least number of keys of a list that is identified by its hash."""


def digest_of(keys: Keys) -> bytes:
    """Return the hash that identifies a key list; b"" for a list so short that a hash saves nothing."""
    return blake2b(keys.tobytes(), digest_size=16).digest() if len(keys) >= HASHED else b""


def padded(size: int) -> int:
    """Return `size` rounded up to a multiple of eight."""
    return -(-size // 8) * 8


def pack(arrays: Sequence[Array]) -> memoryview:
    """Return the arrays' bytes in one buffer; no copy when a PayloadWriter has put them one after another already."""
    where = _together(arrays)
    if where is not None:
        return where
    writer = PayloadWriter(sum(padded(array.nbytes) for array in arrays))
    for array in arrays:
        writer.array(array)
    return writer.whole.data


def _together(arrays: Sequence[Array]) -> memoryview | None:
    """Return the span of one buffer that these arrays fill without gaps, in order; None if there is no such span."""
    base = arrays[0].base if arrays else None
    if not isinstance(base, np.ndarray) or base.dtype != np.uint8 or base.ndim != 1:
        return None
    start = at = arrays[0].ctypes.data
    for array in arrays:
        if array.base is not base or array.ctypes.data != at or array.nbytes % 8:
            return None
        at += array.nbytes
    first = start - base.ctypes.data
    return base.data[first : first + at - start]


def lanes_size(lanes: Lanes, count: int) -> int:
    """Return the bytes that `count` rows like these take in a payload."""
    extra = 0 if lanes.extra is None else 8 * count * lanes.extra.shape[1]
    return extra + padded(count * lanes.values.shape[1] * lanes.values.dtype.itemsize)


Allocate = Callable[[int], Array]
"""Returns new memory of the given number of bytes."""


def allocate_private(size: int) -> Array:
    """Return memory that is not shared with other processes."""
    return np.empty(size, dtype=np.uint8)


class PayloadWriter:
    """Writes arrays and rows into a new payload, one after another.

    Args:
        size: bytes of the whole payload.
        allocate: returns the payload's memory.
    """

    def __init__(self, size: int, allocate: Allocate = allocate_private) -> None:
        self.whole = allocate(size)
        self.at = 0
        """Bytes that are written so far."""

    def reserve(self, size: int) -> Array:
        """Return the next `size` bytes, to be written by the caller."""
        start, self.at = self.at, self.at + padded(size)
        self.whole[start + size : self.at] = 0
        return self.whole[start : start + size]

    def array(self, array: Array) -> None:
        """Copy an array."""
        self.reserve(array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def rows(self, array: Array, extra: torch.Tensor | None, rows: Keys) -> None:
        """Copy these rows.

        Args:
            words: the values (`array_of`).
            extra: the integers that the reduction keeps with them.
            rows: slots of the rows to copy; for a negative slot an arbitrary row is copied.
        """
        for each in (array,) if extra is None else (extra.numpy(), array):
            (count,), width = rows.shape, each.shape[1]
            buffer = self.reserve(count * width * each.itemsize).view(each.dtype).reshape(count, width)
            if buffer.size:
                each.take(rows, 0, buffer, "clip")


class PayloadReader:
    """Reads arrays from a payload in the order in which they were packed.

    Raises:
        ProtocolError: from its methods, when the payload is shorter than the requested array.
    """

    def __init__(self, payload: memoryview) -> None:
        held = np.frombuffer(payload, dtype=np.uint8)
        self._bytes = held if held.flags.writeable else held.copy()  # torch accepts no read-only array
        self._at = 0

    def array(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Return the next `count` elements as a view of the payload."""
        size = count * np.dtype(dtype).itemsize
        stop = self._at + size
        if count < 0 or stop > len(self._bytes):
            raise ProtocolError("a payload is shorter than its message says")
        found: Array = self._bytes[self._at : stop].view(dtype)
        self._at += padded(size)
        return found

    def keys(self, count: int) -> Keys:
        """Return the next `count` keys."""
        return self.array(count, np.int64)

    def lanes(self, count: int, width: int, dtype: torch.dtype, extra: int) -> Lanes:
        """Return the next `count` rows."""
        whole = torch.from_numpy(self.array(count * extra, np.int64)).view(count, extra) if extra else None
        values = self.array(count * width, array_dtype(dtype)).reshape(count, width)
        return Lanes(tensor_from(values, dtype), whole)


def lanes_arrays(lanes: Lanes) -> list[Array]:
    """Return rows as arrays to pack, as `PayloadReader.lanes` reads them."""
    values = bytes_of(lanes.values)
    return [values] if lanes.extra is None else [lanes.extra.contiguous().numpy(), values]


def bytes_of(values: torch.Tensor) -> Array:
    """Return a tensor's memory as bytes; numpy has no bfloat16."""
    array: Array = values.contiguous().view(-1).view(torch.uint8).numpy()
    return array
