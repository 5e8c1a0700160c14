"""Keys and rows as the bytes of one payload, and payloads in parts.

A payload is a row of arrays, each padded to eight bytes so that it can be read where it lies. Which arrays follow from
the message's sections, in their order:

    Section     keys (unless by digest), sequences (if numbered), whole numbers beside the rows, values
                call: keys only
    Asked       keys (unless by digest, or a range)
    Given       keys (if told), which rows are there (a byte each), whole numbers, values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from psctl.errors import ProtocolError
from psctl.ps.messages import LARGE
from psctl.ps.table_messages import More
from psctl.ps.tables.reductions import Array, Lanes, values_of, word_of
from psctl.ps.tables.row_index import Keys

LIMIT = 64 << 20
"""Bytes of one message's payload; what is larger travels in several messages."""

HASHED = 32
"""Keys from which a list is known by its hash."""


def digest_of(keys: Keys) -> bytes:
    """Return the hash by which a whole key list is known; of a short one none, for it is no longer than its hash."""
    return blake2b(keys.tobytes(), digest_size=16).digest() if len(keys) >= HASHED else b""


def padded(size: int) -> int:
    """Return the bytes that an array of so many takes."""
    return -(-size // 8) * 8


def pack(arrays: Sequence[Array]) -> memoryview:
    """Return the arrays' bytes in one buffer: that in which a Writer has put them, where they lie there in a row."""
    where = _together(arrays)
    if where is not None:
        return where
    writer = PayloadWriter(sum(padded(array.nbytes) for array in arrays))
    for array in arrays:
        writer.array(array)
    return writer.whole.data


def _together(arrays: Sequence[Array]) -> memoryview | None:
    """Return the span of one buffer in which these arrays lie one behind the other; None: they do not."""
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
    """Return the bytes that so many rows like these take in a payload."""
    beside = 0 if lanes.beside is None else 8 * count * lanes.beside.shape[1]
    return beside + padded(count * lanes.values.shape[1] * lanes.values.dtype.itemsize)


Room = Callable[[int], Array]
"""Returns new memory of so many bytes."""


def private(size: int) -> Array:
    """Return memory of this process alone."""
    return np.empty(size, dtype=np.uint8)


class PayloadWriter:
    """Puts arrays and rows into a new payload, one behind the other.

    Args:
        size: bytes of all of it.
        room: where memory comes from.
    """

    def __init__(self, size: int, room: Room = private) -> None:
        self.whole = room(size)
        self.at = 0
        """Bytes that are filled."""

    def reserve(self, size: int) -> Array:
        """Return the next so many bytes."""
        start, self.at = self.at, self.at + padded(size)
        self.whole[start + size : self.at] = 0
        return self.whole[start : start + size]

    def array(self, array: Array) -> None:
        """Copy an array."""
        self.reserve(array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def rows(self, words: Array, beside: torch.Tensor | None, rows: Keys) -> None:
        """Copy these rows.

        Args:
            words: the values (`words_of`).
            beside: the whole numbers beside them.
            rows: which; of a negative one it copies any.
        """
        for each in (words,) if beside is None else (beside.numpy(), words):
            (count,), width = rows.shape, each.shape[1]
            room = self.reserve(count * width * each.itemsize).view(each.dtype).reshape(count, width)
            if room.size:
                each.take(rows, 0, room, "clip")


class PayloadReader:
    """Takes arrays out of a payload in the order in which they were packed.

    Raises:
        ProtocolError: from its methods, when the payload is shorter than what is wanted.
    """

    def __init__(self, payload: memoryview) -> None:
        held = np.frombuffer(payload, dtype=np.uint8)
        self._bytes = held if held.flags.writeable else held.copy()  # torch takes no array that may not be written
        self._at = 0

    def array(self, count: int, dtype: Any) -> Array:
        """Return the next `count` elements, where they lie."""
        size = count * np.dtype(dtype).itemsize
        stop = self._at + size
        if count < 0 or stop > len(self._bytes):
            raise ProtocolError("a payload is shorter than its message says")
        found: Array = self._bytes[self._at : stop].view(dtype)
        self._at += padded(size)
        return found

    def keys(self, count: int) -> Keys:
        """Return the next so many keys."""
        return self.array(count, np.int64)

    def lanes(self, count: int, width: int, dtype: torch.dtype, beside: int) -> Lanes:
        """Return the next so many rows."""
        whole = torch.from_numpy(self.array(count * beside, np.int64)).view(count, beside) if beside else None
        return Lanes(values_of(self.words(count, width, dtype), dtype), whole)

    def words(self, count: int, width: int, dtype: torch.dtype) -> Array:
        """Return the values of the next so many rows, as `words_of` gives them."""
        return self.array(count * width, word_of(dtype)).reshape(count, width)


def lanes_arrays(lanes: Lanes) -> list[Array]:
    """Return rows as arrays to pack, as `PayloadReader.lanes` reads them."""
    values = bytes_of(lanes.values)
    return [values] if lanes.beside is None else [lanes.beside.contiguous().numpy(), values]


def bytes_of(values: torch.Tensor) -> Array:
    """Return a tensor's memory as bytes; numpy has no bfloat16."""
    array: Array = values.contiguous().view(-1).view(torch.uint8).numpy()
    return array


def in_parts(message: Any, payload: memoryview | None) -> Iterator[tuple[Any, memoryview | None]]:
    """Yield a message and its payload as they are sent: the first part, then More."""
    if payload is None or not len(payload):
        yield message, None
        return
    yield message, payload[:LARGE]
    for offset in range(LARGE, len(payload), LARGE):
        yield More(offset), payload[offset : offset + LARGE]


class PayloadAssembly:
    """Puts the parts of a peer's messages together again; one a connection.

    Args:
        limit: bytes of a message's payload that are taken in.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._message: Any = None
        self._buffer = memoryview(b"")
        self._filled = 0

    def place(self, message: Any, size: int) -> memoryview:
        """Return where the payload of `message` goes.

        Raises:
            ProtocolError: it is not what must come now, or larger than may be.
        """
        if not isinstance(message, More):
            whole = int(getattr(message, "size", False))
            if not 0 < size <= whole <= self._limit or self._message is not None:
                raise ProtocolError(f"{type(message).__name__} with {size} of {whole} bytes out of turn")
            self._message, self._filled = message, 0
            self._buffer = np.empty(whole, dtype=np.uint8).data
        elif self._message is None or message.offset != self._filled or self._filled + size > len(self._buffer):
            raise ProtocolError("a part of nothing, or not the next one")
        return self._buffer[self._filled : self._filled + size]

    def received(self, message: Any, size: int) -> tuple[Any, memoryview] | None:
        """Note that a payload stands where `place` said; return a message that is whole now, and its bytes."""
        if not size:
            if isinstance(message, More) or getattr(message, "size", False):
                raise ProtocolError(f"{type(message).__name__} without its bytes")
            return message, memoryview(b"")
        self._filled += size
        if self._filled < len(self._buffer):
            return None
        whole, buffer = self._message, self._buffer
        self._message, self._buffer = None, memoryview(b"")
        return whole, buffer
