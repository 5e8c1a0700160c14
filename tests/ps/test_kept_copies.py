"""The memory of a shard's copies: used again for the next checkpoint, unless the last one is still being sent."""

from __future__ import annotations

import numpy as np
import torch

from psctl.ps.snapshot import KeptCopies


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def floats(data: memoryview) -> list[float]:
    return list(np.frombuffer(data, np.float32))


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    copies, values = KeptCopies(), torch.arange(4.0)
    first = copies.copy("param/w", values)
    place = address(first)
    assert floats(first) == [0, 1, 2, 3]
    del first
    values.add_(10)
    again = copies.copy("param/w", values)
    assert (address(again), floats(again)) == (place, [10, 11, 12, 13])


def test_memory_that_is_still_to_be_sent_does_not_change() -> None:
    copies, values = KeptCopies(), torch.arange(4.0)
    part = copies.copy("param/w", values)[4:12]  # as a connection holds it
    values.add_(10)
    second = copies.copy("param/w", values)
    assert floats(part) == [1, 2]
    assert floats(second) == [10, 11, 12, 13]
    place = address(second)
    del second
    values.add_(10)
    assert address(copies.copy("param/w", values)) == place, "the newer memory is kept"
    assert floats(part) == [1, 2]


def test_another_shape_or_type_gets_memory_of_its_own() -> None:
    copies = KeptCopies()
    copies.copy("param/w", torch.arange(4.0))
    assert floats(copies.copy("param/w", torch.arange(6.0))) == [0, 1, 2, 3, 4, 5]
    assert bytes(copies.copy("param/w", torch.tensor([1], dtype=torch.int64))) == b"\1" + bytes(7)
