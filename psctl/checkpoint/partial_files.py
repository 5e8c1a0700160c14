"""Files of a checkpoint while it is written or received: parts in any order, each byte exactly once.

The checksum is updated as long as parts arrive in order; parts that arrive early are read back at the end. So in the
usual case each byte is read once.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from psctl import errors
from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import CHUNK, Disk, checksum, new_checksum
from psctl.checkpoint.manifest import StoredSlice, TensorFile
from psctl.types import Range, TensorSlice

Buffer = bytes | bytearray | memoryview


class ReceivedRanges:
    """The ranges received of `size` bytes, and their checksum. Pure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._running = new_checksum()
        self._summed = 0  # the checksum covers [0, _summed)
        self._ahead: list[Range] = []  # received out of order; sorted, disjoint

    def add(self, offset: int, data: memoryview) -> str:
        """Record a part; return its fault, or ""."""
        part = Range(offset, offset + data.nbytes)
        if part.start < 0 or part.stop > self.size:
            return f"bytes [{part.start}:{part.stop}] of {self.size}"
        place = bisect.bisect(self._ahead, part)
        behind = self._ahead[place - 1].stop if place else self._summed
        before = self._ahead[place].start if place < len(self._ahead) else self.size
        if part.start < max(behind, self._summed) or part.stop > before:
            return f"bytes [{part.start}:{part.stop}] twice"
        if part.start == self._summed:
            self._running.update(data)
            self._summed = part.stop
        elif len(part):
            self._ahead.insert(place, part)
        return ""

    def missing(self) -> Range | None:
        """Return the first range that was not received."""
        end = self._summed
        for part in self._ahead:
            if part.start > end:
                return Range(end, part.start)
            end = part.stop
        return Range(end, self.size) if end < self.size else None

    def checksum(self, descriptor: int, offset: int) -> str:
        """Return the checksum of all bytes, which begin at byte `offset` of an open file."""
        while self._summed < self.size:
            data = os.pread(descriptor, min(CHUNK, self.size - self._summed), offset + self._summed)
            if not data:
                raise errors.CheckpointIncomplete("a file became shorter while it was written")
            self._running.update(data)
            self._summed += len(data)
        self._ahead.clear()
        return self._running.hexdigest()


class OpenFile:
    """A new file that parts are written to; safe for several threads. `folder` is the descriptor of its folder."""

    def __init__(self, path: Path, folder: int, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._lock = threading.Lock()
        self._descriptor = disk.create(path, folder)

    def write(self, data: memoryview, offset: int) -> None:
        """Write at byte `offset`; does nothing after `close`."""
        with self._lock:
            if self._descriptor >= 0:
                self._disk.write(self.path, self._descriptor, data, offset)

    def sync(self) -> int:
        """Sync the bytes to the disk and return the descriptor, still open for reading."""
        self._disk.sync(self.path, self._descriptor)
        return self._descriptor

    def close(self) -> None:
        """Close it; closing it twice is harmless."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class PartialTensorFile:
    """One sender's safetensors file while its slices arrive; `folder` is the descriptor of its folder."""

    def __init__(
        self, source: str, path: Path, folder: int, slices: Sequence[TensorSlice], metadata: dict[str, str], disk: Disk
    ) -> None:
        self._source = source
        self._slices = tuple(slices)
        self._header, self._places = tensorfile.lay_out(slices, metadata)
        sizes = [(piece.stop - piece.start) * tensorfile.width(piece.dtype) for piece in slices]
        self._arrivals = [ReceivedRanges(size) for size in sizes]
        self.file = OpenFile(path, folder, disk)
        try:
            self.file.write(memoryview(self._header), 0)
        except errors.PsctlError:
            self.file.close()
            raise

    def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Write bytes of slice `index` from byte `offset` of it.

        Raises:
            CheckpointCorrupt: the sender's fault: no such slice, bytes outside of it, or bytes sent twice.
            DiskFull: no space is left.
        """
        view = memoryview(data).cast("B")
        if not 0 <= index < len(self._slices):
            raise errors.CheckpointCorrupt(f"{self._source} sent slice {index} of {len(self._slices)}")
        fault = self._arrivals[index].add(offset, view)
        if fault:
            raise errors.CheckpointCorrupt(f"{self._source} sent {fault} for {self._slices[index].name}")
        self.file.write(view, self._places[index] + offset)

    def finish(self) -> TensorFile:
        """Check that all bytes were received, sync them and return their entry for the manifest.

        Raises:
            CheckpointIncomplete: the sender ended early; the message names the tensor.
        """
        for piece, arrivals in zip(self._slices, self._arrivals, strict=True):
            gap = arrivals.missing()
            if gap is not None:
                raise errors.CheckpointIncomplete(
                    f"{self._source} did not send bytes [{gap.start}:{gap.stop}] of {tensorfile.entry_name(piece)}"
                )
        descriptor = self.file.sync()
        stored = tuple(
            StoredSlice(
                piece.name, piece.dtype, piece.shape, piece.start, piece.stop, place, arrivals.size,
                arrivals.checksum(descriptor, place),
            )
            for piece, place, arrivals in zip(self._slices, self._places, self._arrivals, strict=True)
        )  # fmt: skip
        size = len(self._header) + sum(arrivals.size for arrivals in self._arrivals)
        self.file.close()
        return TensorFile(self.file.path.name, size, len(self._header), checksum(self._header), stored)
