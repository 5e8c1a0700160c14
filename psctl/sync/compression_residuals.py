"""What a rank's compressed pushes left out so far, in checkpoints: each rank's own, by parameter.

So a job that goes on from a checkpoint with as many workers pushes what the undisturbed one would have. A rank beyond
those that saved begins with nothing left out, and what a rank that is no more had left out is lost; so is that of a
worker that died, whose replacement begins with nothing: it would have to travel at every step, uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psctl.ps.shards import offsets
from psctl.types import Layout, TensorSlice


def place(rank: int) -> str:
    """Return where a rank's lie in a checkpoint."""
    return f"residual/{rank}/"


class Residuals:
    """One rank's.

    Args:
        flat: by dtype, as the parameters lie one behind the other (ps/dense/client/send_buffers.py).
        layout: what is synchronised.
        rank: whose.
    """

    def __init__(self, flat: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> None:
        self._place = place(rank)
        self._parts: dict[str, torch.Tensor] = {}
        for info, start in zip(layout.parameters, offsets(layout), strict=True):
            if start is not None and info.dtype in flat:
                part = flat[info.dtype].narrow(0, start, info.size)
                self._parts[self._place + info.name] = part.view(info.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them by their names in a checkpoint; they change with the next push."""
        return dict(self._parts)

    def saved(self, tensors: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Return those of a checkpoint's tensors that are this rank's."""
        return [each for each in tensors if each.name in self._parts]

    def load(self, slices: Sequence[TensorSlice], tensors: Sequence[torch.Tensor]) -> None:
        """Take back what was saved."""
        for each, tensor in zip(slices, tensors, strict=True):
            self._parts[each.name].copy_(tensor)
