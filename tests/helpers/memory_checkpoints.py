"""Checkpoints in memory: written from the parts that members send, and read like one on disk."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from psctl.job.checkpoint_messages import SaveBegin, SaveEnd, SavePart
from psctl.job.training_messages import Resume
from psctl.types import Member, State, TensorSlice

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


class MemoryDisk:
    """The checkpoints of a job.

    Args:
        job: the job's name.
        resumed: the checkpoint that the job resumes from.
    """

    def __init__(self, job: str, resumed: MemoryCheckpoint | None = None) -> None:
        self.job, self._resumed = job, resumed
        self.open: dict[int, MemoryCheckpoint] = {}
        """By step: those that are being written."""
        self.whole: dict[int, MemoryCheckpoint] = {}
        """By step: those that are committed."""

    def begin(self, sender: Member, message: SaveBegin) -> None:
        self.open.setdefault(message.step, MemoryCheckpoint(message.step)).begin(sender, message)

    def write(self, sender: Member, message: SavePart, payload: Any) -> None:
        found = self.open.get(message.step)
        if found is not None and payload is not None and (sender, message.tables) in found.slices:
            found.write(sender, message, payload)

    def end(self, sender: Member, message: SaveEnd) -> None:
        if message.step in self.open:
            self.open[message.step].ended.add(sender)

    def commit(self, step: int, streams: list[State] | None = None) -> None:
        self.whole[step] = self.open.pop(step)
        if streams:
            self.whole[step].state["streams"] = streams

    def discard(self, step: int) -> None:
        self.open.pop(step, None)

    def newest(self) -> Resume | None:
        """Return the newest checkpoint, None if there is none, and read from it from now on."""
        self.open.clear()
        if self.whole:
            self._resumed = self.whole[max(self.whole)]
        return self._resumed.resume(self.job) if self._resumed is not None else None

    def read(self, wanted: TensorSlice) -> bytes:
        """Return a slice of the checkpoint that the job resumes from."""
        assert self._resumed is not None, "the job does not go on from a checkpoint"
        return read_slice(self._resumed.tensors, wanted)


def read_slice(tensors: Tensors, wanted: TensorSlice) -> bytes:
    size = _item_size(wanted)
    return bytes(tensors[wanted.name][1][wanted.start * size : wanted.stop * size])


def _item_size(each: TensorSlice) -> int:
    size: int = getattr(torch, each.dtype).itemsize
    return size
