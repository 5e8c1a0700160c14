"""A small model's checkpoint of three senders, and disks that fail or kill their process at an operation."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psctl.checkpoint.disk import Disk, writing
from psctl.checkpoint.manifest import Manifest
from psctl.checkpoint.writer import CheckpointWriter
from psctl.types import TensorSlice

FACTS: dict[str, Any] = {
    "time": 1700000000.5, "world": 2, "servers": 2, "strategy": "ps", "update": "server", "seed": 7, "epoch": 3,
    "state": {"step": 500, "scheduler": {"best": float("inf")}}, "metrics": {"loss": 0.25},
    "code_hash": "c0de", "job_file": "version: 1\nname: digits\n",
}  # fmt: skip

STEP = b"\x00\x00\x80\x3f"  # 1.0

# `w` is cut in the middle of a row over two servers; its step count is with both; the worker has an int64 and a bool.
SENDERS: dict[str, list[tuple[TensorSlice, bytes]]] = {
    "server/0": [
        (TensorSlice("param/w", "float32", (3, 4), 0, 5), bytes(range(20))),
        (TensorSlice("optim/w/exp_avg", "float32", (3, 4), 0, 5), bytes(range(100, 120))),
        (TensorSlice("optim/w/step", "float32", (), 0, 1), STEP),
    ],
    "server/1": [
        (TensorSlice("param/b", "bfloat16", (3,), 0, 3), b"\x01\x02\x03\x04\x05\x06"),
        (TensorSlice("param/w", "float32", (3, 4), 5, 12), bytes(range(20, 48))),
        (TensorSlice("optim/w/exp_avg", "float32", (3, 4), 5, 12), bytes(range(120, 148))),
        (TensorSlice("optim/w/step", "float32", (), 0, 1), STEP),
    ],
    "worker/0": [
        (TensorSlice("buffer/mask", "bool", (3,), 0, 3), b"\x01\x00\x01"),
        (TensorSlice("buffer/seen", "int64", (), 0, 1), b"\x05" + b"\x00" * 7),
        (TensorSlice("buffer/none", "float64", (0, 4), 0, 0), b""),
    ],
}


def fill(writer: CheckpointWriter, senders: dict[str, list[tuple[TensorSlice, bytes]]]) -> None:
    """Send everything, seven bytes at a time, with alternating senders."""
    for source, slices in senders.items():
        writer.open_file(source, [piece for piece, _ in slices])
    offsets = [
        (source, i, at) for source, s in senders.items() for i, (_, d) in enumerate(s) for at in range(0, len(d), 7)
    ]
    for source, index, at in sorted(offsets, key=lambda entry: (entry[1], entry[2])):
        writer.write_part(source, index, at, senders[source][index][1][at : at + 7])
    for source in senders:
        writer.finish_file(source)


def write(
    root: Path,
    step: int = 500,
    senders: dict[str, list[tuple[TensorSlice, bytes]]] | None = None,
    disk: Disk | None = None,
    **facts: Any,
) -> tuple[Path, Manifest]:
    """Write a complete checkpoint below `root`; on an error discard it, as its callers do."""
    folder = root / "digits-3" / f"{step:010d}"
    writer = CheckpointWriter(folder, "digits-3", step, disk)
    try:
        fill(writer, SENDERS if senders is None else senders)
        return folder, writer.commit(**(FACTS | facts))
    except BaseException:
        writer.discard()
        raise


class CountingDisk(Disk):
    """Calls `fault` before each operation with its number and name; a write has two halves."""

    def __init__(self, fault: Callable[[int, str], None]) -> None:
        self.count = 0
        self._fault = fault

    def _next(self, name: str, path: Path) -> None:
        self.count += 1
        with writing(path):
            self._fault(self.count, name)

    def make_folder(self, path: Path) -> int:
        self._next("make_folder", path)
        return super().make_folder(path)

    def create(self, path: Path, folder: int | None = None) -> int:
        self._next("create", path)
        return super().create(path, folder)

    def write(self, path: Path, descriptor: int, data: memoryview, offset: int) -> None:
        half = data.nbytes // 2
        self._next("write", path)
        super().write(path, descriptor, data[:half], offset)
        self._next("write", path)
        super().write(path, descriptor, data[half:], offset + half)

    def sync(self, path: Path, descriptor: int) -> None:
        self._next("sync", path)
        super().sync(path, descriptor)

    def sync_folder(self, path: Path) -> None:
        self._next("sync_folder", path)
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._next("rename", new)
        super().rename(old, new)


def dies_at(number: int) -> CountingDisk:
    """Return a disk that kills its process with SIGKILL before operation `number`."""

    def fault(count: int, name: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingDisk(fault)


def full_at(number: int) -> CountingDisk:
    """Return a disk that is full from operation `number` on, if that operation needs space."""

    def fault(count: int, name: str) -> None:
        if count >= number and name in ("create", "write", "make_folder", "sync"):
            raise OSError(errno.ENOSPC, "No space left on device")

    return CountingDisk(fault)


@pytest.fixture
def senders() -> dict[str, list[tuple[TensorSlice, bytes]]]:
    return {source: list(slices) for source, slices in SENDERS.items()}


@pytest.fixture
def facts() -> dict[str, Any]:
    return dict(FACTS)


@pytest.fixture
def save() -> Callable[..., tuple[Path, Manifest]]:
    return write


@pytest.fixture
def feed() -> Callable[..., None]:
    return fill


@pytest.fixture
def disks() -> dict[str, Callable[..., CountingDisk]]:
    return {"counting": CountingDisk, "dies_at": dies_at, "full_at": full_at}
