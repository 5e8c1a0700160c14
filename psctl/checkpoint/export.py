"""Export: the model of a checkpoint as one plain safetensors file with the user's own names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from psctl import errors
from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import Disk, writing
from psctl.checkpoint.manifest import Manifest, whole
from psctl.checkpoint.reader import read
from psctl.words import TensorSlice

MODEL = ("param/", "buffer/")


def export(folder: Path, manifest: Manifest, out: Path, disk: Disk | None = None) -> int:
    """Write parameters and buffers, each whole under its name in the model's state_dict; return the file's bytes.

    Args:
        folder, manifest: a checkpoint that was verified.
        out: the new file; one of that name is replaced at the end.

    Raises:
        DiskFull, CheckpointIncomplete: the disk refused; `out` is as it was.
        UsageError: the checkpoint has no parameters.
    """
    disk = disk or Disk()
    tensors = _named(manifest)
    if not tensors:
        raise errors.UsageError(f"{manifest.id} holds no parameters", where=manifest.id)
    targets = [TensorSlice(name, t.dtype, t.shape, t.start, t.stop) for name, t in tensors.items()]
    header, places = tensorfile.lay_out(targets, {"format": "pt", "psctl": manifest.id})
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    size = len(header)
    try:
        descriptor = disk.create(partial)
        try:
            disk.write(partial, descriptor, memoryview(header), 0)
            for tensor, place in zip(tensors.values(), places, strict=True):
                for offset, data in read(folder, manifest, tensor):
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


def _named(manifest: Manifest) -> Mapping[str, TensorSlice]:
    return {
        tensor.name.removeprefix(prefix): tensor
        for prefix in MODEL
        for tensor in whole(manifest)
        if tensor.name.startswith(prefix)
    }
