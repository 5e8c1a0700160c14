"""A checkpoint in memory: takes the parts that members send, and is read and resumed from like one on disk."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from psctl.job.checkpoint_messages import SaveBegin, SavePart
from psctl.job.training_messages import Resume
from psctl.types import TensorSlice

Tensors = dict[str, tuple[TensorSlice, bytearray]]
"""Each whole tensor by name, and its bytes."""


class MemoryCheckpoint:
    """The checkpoint of one step; parts may arrive on several threads."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: dict[str, Any] = {}
        self.tensors: Tensors = {}
        self.ended: set[object] = set()
        """Senders that have sent their parts."""
        self.slices: dict[tuple[object, bool], list[TensorSlice]] = {}
        self._lock = threading.Lock()

    def begin(self, sender: object, message: SaveBegin) -> None:
        with self._lock:
            self.slices[sender, message.tables] = message.slices
            if message.state is not None:
                self.state = dict(message.state)
            for each in message.slices:
                count = math.prod(each.shape)
                whole = TensorSlice(each.name, each.dtype, each.shape, 0, count)
                self.tensors.setdefault(each.name, (whole, bytearray(count * _item_size(each))))

    def write(self, sender: object, message: SavePart, payload: Any) -> None:
        each = self.slices[sender, message.tables][message.index]
        start = each.start * _item_size(each) + message.offset
        self.tensors[each.name][1][start : start + len(payload)] = payload

    def tensor(self, name: str) -> torch.Tensor:
        whole, data = self.tensors[name]
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, whole.dtype)).reshape(whole.shape)

    def resume(self, job: str) -> Resume:
        return Resume(f"{job}@{self.step}", self.step, self.state, [whole for whole, _ in self.tensors.values()])


def read_slice(tensors: Tensors, wanted: TensorSlice) -> bytes:
    size = _item_size(wanted)
    return bytes(tensors[wanted.name][1][wanted.start * size : wanted.stop * size])


def _item_size(each: TensorSlice) -> int:
    size: int = getattr(torch, each.dtype).itemsize
    return size
