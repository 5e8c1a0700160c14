"""Export: the model of a checkpoint as one plain safetensors file with the user's own names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from psctl import errors
from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import Disk, checksum, new_checksum, writing
from psctl.checkpoint.manifest import Manifest, slices_by_name, whole_tensors
from psctl.checkpoint.reader import read_slice
from psctl.checkpoint.writer import partial_path, remove_abandoned_for
from psctl.types import TensorSlice

MODEL = ("param/", "buffer/")


def export_model(folder: Path, manifest: Manifest, out: Path, disk: Disk | None = None) -> int:
    """Write parameters and buffers, each whole under its name in the model's state_dict; return the file's bytes.

    Args:
        folder, manifest: a checkpoint that was verified.
        out: the new file; one of that name is replaced at the end.

    Raises:
        DiskFull, CheckpointIncomplete: the disk refused; `out` is as it was.
        UsageError: the checkpoint has no parameters.
    """
    disk = disk or Disk()
    header, tensors = _laid_out(manifest)
    partial = partial_path(out)
    partial.unlink(missing_ok=True)
    size = len(header)
    try:
        descriptor = disk.create(partial)
        try:
            disk.write(partial, descriptor, memoryview(header), 0)
            for tensor, place in tensors:
                for offset, data in read_slice(folder, manifest, tensor):
                    disk.write(partial, descriptor, memoryview(data), place + offset)
                    size += len(data)
            disk.sync(partial, descriptor)
        finally:
            os.close(descriptor)
        disk.rename(partial, out)
    except BaseException:
        with writing(partial):
            partial.unlink(missing_ok=True)
        raise
    return size


class ExportReceiver:
    """Receives an exported model and compares it with the manifest; a context manager that leaves no partial file.

    Args:
        manifest: of the checkpoint; proved.
        out: the new file; one of that name is replaced by `finish`.

    Attributes:
        size: the bytes that it must have.
    """

    def __init__(self, manifest: Manifest, out: Path, disk: Disk | None = None) -> None:
        header, tensors = _laid_out(manifest)
        slices = slices_by_name(manifest.files)
        ranges = [(len(header), checksum(header), "its header")]
        for tensor, _ in sorted(tensors, key=lambda pair: pair[1]):
            pieces = [piece for _, piece in slices[tensor.name]]
            found = pieces[:1] if tensor.shape == () else pieces
            ranges += [(piece.size, piece.checksum, tensor.name) for piece in found if piece.size]
        self.size = sum(size for size, _, _ in ranges)
        self._id, self._out, self._disk = manifest.id, out, disk or Disk()
        self._partial = partial_path(out)
        self._left = iter(ranges)
        self._range, self._missing, self._running = next(self._left), len(header), new_checksum()
        self._offset = 0
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_for(out)
            self._partial.unlink(missing_ok=True)
        self._descriptor = self._disk.create(self._partial)

    def write(self, data: bytes) -> None:
        """Write the next bytes.

        Raises:
            CheckpointCorrupt: they differ from the checkpoint's. DiskFull: this machine's disk is full.
        """
        self._disk.write(self._partial, self._descriptor, memoryview(data), self._offset)
        self._offset += len(data)
        view = memoryview(data)
        if self._offset > self.size:
            raise errors.CheckpointCorrupt(f"the exported model of {self._id} has more than its bytes", where=self._id)
        while view:
            part, view = view[: self._missing], view[self._missing :]
            self._running.update(part)
            self._missing -= len(part)
            if self._missing == 0:
                _, expected, what = self._range
                if self._running.hexdigest() != expected:
                    raise errors.CheckpointCorrupt(
                        f"the exported model of {self._id} is not the checkpoint's: {what} differs", where=self._id
                    )
                self._range = next(self._left, (0, "", ""))
                self._missing, self._running = self._range[0], new_checksum()

    def finish(self) -> None:
        """Sync the file and give it its name. CheckpointIncomplete when bytes are missing."""
        if self._offset != self.size:
            raise errors.CheckpointIncomplete(
                f"{self._offset} of {self.size} bytes of the exported model of {self._id} came", where=self._id
            )
        self._disk.sync(self._partial, self._descriptor)
        self._disk.rename(self._partial, self._out)

    def __enter__(self) -> ExportReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        with writing(self._partial):
            self._partial.unlink(missing_ok=True)


def _laid_out(manifest: Manifest) -> tuple[bytes, list[tuple[TensorSlice, int]]]:
    """Return the header of an exported file, and each tensor of the checkpoint with its byte offset in it."""
    tensors = _named(manifest)
    if not tensors:
        raise errors.UsageError(f"{manifest.id} holds no parameters", where=manifest.id)
    targets = [TensorSlice(name, t.dtype, t.shape, t.start, t.stop) for name, t in tensors.items()]
    header, places = tensorfile.lay_out(targets, {"format": "pt", "psctl": manifest.id})
    return header, list(zip(tensors.values(), places, strict=True))


def _named(manifest: Manifest) -> Mapping[str, TensorSlice]:
    return {
        tensor.name.removeprefix(prefix): tensor
        for prefix in MODEL
        for tensor in whole_tensors(manifest)
        if tensor.name.startswith(prefix)
    }
