"""Memory for slices of tensors, whose bytes arrive in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psctl.ps.pieces import bytes_view, torch_dtype
from psctl.types import TensorSlice


class ReceivedSlices:
    """The slices of one request, in its order."""

    def __init__(self, slices: Sequence[TensorSlice] = ()) -> None:
        self.slices = list(slices)
        self.tensors = [torch.empty(each.stop - each.start, dtype=torch_dtype(each.dtype)) for each in slices]
        """The memory of each slice, flat."""
        self._received: dict[tuple[int, int], int] = {}  # by slice and offset: bytes; a part may come twice

    def part(self, index: int, offset: int, size: int) -> memoryview | None:
        """Return the bytes [offset, offset + size) of slice `index`; None when it has no such bytes."""
        if not 0 <= index < len(self.tensors):
            return None
        whole = bytes_view(self.tensors[index])
        if not 0 <= offset <= offset + size <= len(whole):
            return None
        self._received[index, offset] = size
        return whole[offset : offset + size]

    @property
    def missing(self) -> int:
        """Bytes for which no part has come."""
        return sum(tensor.nbytes for tensor in self.tensors) - sum(self._received.values())

    def whole_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in their shapes; every slice is a whole tensor."""
        return [tensor.reshape(each.shape) for each, tensor in zip(self.slices, self.tensors, strict=True)]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the same by name."""
        return {each.name: tensor for each, tensor in zip(self.slices, self.whole_tensors(), strict=True)}
