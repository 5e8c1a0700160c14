"""Memory for slices that arrive in parts: a part outside a slice has no place."""

from __future__ import annotations

import pytest
import torch

from psctl.ps.received_slices import ReceivedSlices
from psctl.types import TensorSlice


def test_parts_are_received_at_their_places() -> None:
    received = ReceivedSlices([TensorSlice("w", "float32", (2, 2), 0, 4), TensorSlice("b", "uint8", (3,), 0, 3)])
    for offset, value in ((0, 1.0), (8, 2.0)):
        part = received.part(0, offset, 8)
        assert part is not None
        part[:] = torch.full((2,), value).numpy().tobytes()
    assert received.missing == 3
    assert received.part(0, 8, 8) is not None, "a part may come twice"
    assert received.missing == 3
    assert received.part(1, 0, 3) is not None
    assert received.missing == 0
    assert received.by_name()["w"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert [tuple(each.shape) for each in received.whole_tensors()] == [(2, 2), (3,)]


@pytest.mark.parametrize(("index", "offset", "size"), [(-1, 0, 1), (1, 0, 1), (0, -1, 1), (0, 0, 4), (0, 3, 1)])
def test_a_part_outside_a_slice_has_no_place(index: int, offset: int, size: int) -> None:
    received = ReceivedSlices([TensorSlice("b", "uint8", (3,), 0, 3)])
    assert received.part(index, offset, size) is None
    assert received.part(0, 1, 2) is not None
