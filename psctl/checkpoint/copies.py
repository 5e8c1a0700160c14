"""Copies of a checkpoint: its files are read as bytes on one side; received, verified and renamed on the other.

The same code copies one from a host to this machine (`checkpoint pull`) or to another cluster. Received files are
written next to their final name, verified against the manifest, and only then get that name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from psctl import errors
from psctl.checkpoint.disk import CHUNK, Disk, Unfit, pieces, regular_size
from psctl.checkpoint.manifest import MANIFEST, MAX_FILES, Manifest, shared_files
from psctl.checkpoint.partial_files import Buffer, OpenFile, ReceivedRanges
from psctl.checkpoint.reader import open_checkpoint, verify
from psctl.checkpoint.writer import PartialFolder

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*\.(?:safetensors|json)")


def file_sizes(folder: Path, manifest: Manifest) -> dict[str, int]:
    """Return the files of a checkpoint and their sizes in bytes, the manifest last."""
    return manifest.sizes() | {MANIFEST: regular_size(folder / MANIFEST)}


def read_parts(folder: Path, files: Mapping[str, int], chunk: int = CHUNK) -> Iterator[tuple[str, int, bytes]]:
    """Yield (file, offset, bytes) of all files. CheckpointIncomplete when one was removed or became shorter."""
    for name, size in files.items():
        offset = 0
        try:
            for data in pieces(folder / name, 0, size, chunk):
                yield name, offset, data
                offset += len(data)
        except (FileNotFoundError, Unfit):
            offset = -1
        if offset != size:
            raise errors.CheckpointIncomplete(f"{folder / name} was removed while it was copied", where=str(folder))


class CheckpointReceiver:
    """Receives a checkpoint's files; it is complete or absent, as with CheckpointWriter.

    Args:
        folder: its final name on this host.
        files: file names and sizes in bytes, as `file_sizes` returns them; not trusted.
        base: folder of an earlier checkpoint on this host.
        linked: those of the files that are not received, and their names in that folder; not trusted.

    Raises:
        CheckpointCorrupt: names that no checkpoint has.
        DiskFull: less free space than the files need, or none left later.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, int], disk: Disk | None = None, base: Path | None = None,
        linked: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._disk = disk = disk or Disk()
        self._open: dict[str, OpenFile] = {}
        self._linked, self._earlier = linked or {}, None if base is None else open_checkpoint(base)
        received = {name: size for name, size in files.items() if name not in self._linked}
        self._arrivals = {name: ReceivedRanges(size) for name, size in received.items()}
        for name, size in files.items():
            if not _FILE_NAME.fullmatch(name) or size < 0 or len(files) > MAX_FILES:
                raise errors.CheckpointCorrupt(f"a copy of a checkpoint cannot hold a file {name!r} of {size} bytes")
        if not self._linked.keys() <= files.keys():
            raise errors.CheckpointCorrupt(f"the copy of {folder} links files that it does not have")
        self._partial = PartialFolder(folder, disk)
        wanted, free = sum(received.values()), shutil.disk_usage(self._partial.path).free
        if wanted > free:
            self.discard()
            raise errors.DiskFull(f"{folder} needs {wanted} bytes, the disk has {free} left", hint="free space there")
        try:
            self._link(base)
            for name in self._arrivals:
                self._open[name] = OpenFile(self._partial.path / name, self._partial.descriptor, disk)
        except errors.PsctlError:
            self.discard()
            raise

    def write_part(self, file: str, offset: int, data: Buffer) -> None:
        """Write bytes of a file from byte `offset`. CheckpointCorrupt when they lie outside of it or arrived before."""
        view = memoryview(data).cast("B")
        fault = self._arrivals[file].add(offset, view) if file in self._arrivals else "bytes of an unknown file"
        if fault:
            raise errors.CheckpointCorrupt(f"the copy of {self.folder} got {fault} for {file!r}")
        self._open[file].write(view, offset)

    def writer_of(self, file: str) -> Callable[[bytes], None]:
        """Return a function that writes a file's bytes in order."""
        offset = 0

        def take(data: bytes) -> None:
            nonlocal offset
            self.write_part(file, offset, data)
            offset += len(data)

        return take

    def finish(self) -> Manifest:
        """Sync all files, verify every byte, and give the folder its final name.

        Raises:
            CheckpointIncomplete: bytes are missing. CheckpointCorrupt: they do not match the manifest.
        """
        for name, arrivals in self._arrivals.items():
            gap = arrivals.missing()
            if gap is not None:
                raise errors.CheckpointIncomplete(
                    f"{self.folder}: bytes [{gap.start}:{gap.stop}] of {name} are missing"
                )
            self._open[name].sync()
            self._open[name].close()
        found = open_checkpoint(self._partial.path)
        same = {} if self._earlier is None else shared_files(found, self._earlier)
        faults = verify(self._partial.path, {name for name, old in self._linked.items() if same.get(name) == old})
        if faults:
            raise errors.CheckpointCorrupt(f"the copy of {self.folder} is damaged: {faults[0]}", where=str(self.folder))
        self._partial.publish()
        return open_checkpoint(self.folder)

    def _link(self, base: Path | None) -> None:
        """Link the files of the earlier checkpoint."""
        known = {} if self._earlier is None else self._earlier.sizes()
        for name, old in self._linked.items():
            if base is None or old not in known:
                raise errors.CheckpointIncomplete(f"{self.folder}: no earlier checkpoint here has {old!r}")
            self._disk.link(base / old, self._partial.path / name, self._partial.descriptor)

    def discard(self) -> None:
        """Remove what was received; harmless after finish."""
        for file in self._open.values():
            file.close()
        self._partial.discard()
