"""A second copy of a checkpoint: its files as bytes on one side, received, proved and published on the other.

The same road brings one from a host to this machine (`checkpoint pull`) or to another cluster. Whatever moves the
bytes: what arrives is written beside its final name, verified against its manifest, and only then gets that name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from psctl import errors
from psctl.checkpoint.disk import CHUNK, Disk, Unfit, pieces, regular_size
from psctl.checkpoint.landing import Arrivals, Buffer, Held, OpenFile
from psctl.checkpoint.manifest import MANIFEST, MAX_FILES, Manifest
from psctl.checkpoint.reader import open_checkpoint, verify
from psctl.checkpoint.writer import publish, temporary

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*\.(?:safetensors|json)")


def outgoing(folder: Path, manifest: Manifest) -> dict[str, int]:
    """Return the files of a checkpoint and their sizes in bytes, the manifest last."""
    return manifest.sizes() | {MANIFEST: regular_size(folder / MANIFEST)}


def parts(folder: Path, files: Mapping[str, int], chunk: int = CHUNK) -> Iterator[tuple[str, int, bytes]]:
    """Yield (file, offset, bytes) of all files. CheckpointIncomplete when one is gone or became shorter (pruned)."""
    for name, size in files.items():
        offset = 0
        try:
            for data in pieces(folder / name, 0, size, chunk):
                yield name, offset, data
                offset += len(data)
        except (FileNotFoundError, Unfit):
            offset = -1
        if offset != size:
            raise errors.CheckpointIncomplete(f"{folder / name} went away while it was copied", where=str(folder))


class Receiver:
    """A checkpoint while its files arrive; whole or absent, as by Writer.

    Args:
        folder: its final name on this host.
        files: file names and sizes in bytes, as `outgoing` gives them; not trusted.

    Raises:
        CheckpointCorrupt: names that are none of a checkpoint's.
        DiskFull: less free space than the sizes say, or none left later.
    """

    def __init__(self, folder: Path, files: Mapping[str, int], disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or Disk()
        self._partial = temporary(folder)
        self._open: dict[str, OpenFile] = {}
        self._arrivals = {name: Arrivals(size) for name, size in files.items()}
        for name, size in files.items():
            if not _FILE_NAME.fullmatch(name) or size < 0 or len(files) > MAX_FILES:
                raise errors.CheckpointCorrupt(f"a copy of a checkpoint cannot hold a file {name!r} of {size} bytes")
        self._disk.remove(self._partial)
        self._at = Held(self._disk.make_folder(self._partial))
        wanted, free = sum(files.values()), shutil.disk_usage(self._partial).free
        if wanted > free:
            self.discard()
            raise errors.DiskFull(f"{folder} needs {wanted} bytes, the disk has {free} left", hint="free space there")
        try:
            for name in files:
                self._open[name] = OpenFile(self._partial / name, self._at.descriptor, self._disk)
        except errors.PsctlError:
            self.discard()
            raise

    def part(self, file: str, offset: int, data: Buffer) -> None:
        """Write bytes of a file from byte `offset`. CheckpointCorrupt when they are not of it or came before."""
        view = memoryview(data).cast("B")
        fault = self._arrivals[file].add(offset, view) if file in self._arrivals else "bytes of an unknown file"
        if fault:
            raise errors.CheckpointCorrupt(f"the copy of {self.folder} got {fault} for {file!r}")
        self._open[file].write(view, offset)

    def taker(self, file: str) -> Callable[[bytes], None]:
        """Return what takes a file's bytes in order."""
        offset = 0

        def take(data: bytes) -> None:
            nonlocal offset
            self.part(file, offset, data)
            offset += len(data)

        return take

    def finish(self) -> Manifest:
        """All was sent: bring it to the disk, prove every byte, give the folder its final name.

        Raises:
            CheckpointIncomplete: bytes are missing. CheckpointCorrupt: they are not what the manifest says.
        """
        for name, arrivals in self._arrivals.items():
            gap = arrivals.missing()
            if gap is not None:
                raise errors.CheckpointIncomplete(
                    f"{self.folder}: bytes [{gap.start}:{gap.stop}] of {name} are missing"
                )
            self._open[name].sync()
            self._open[name].close()
        open_checkpoint(self._partial)
        faults = verify(self._partial)
        if faults:
            raise errors.CheckpointCorrupt(f"the copy of {self.folder} is damaged: {faults[0]}", where=str(self.folder))
        publish(self._partial, self.folder, self._disk)
        self._at.close()
        return open_checkpoint(self.folder)

    def discard(self) -> None:
        """Give it up and remove what came; harmless after finish."""
        for file in self._open.values():
            file.close()
        self._disk.remove(self._partial)
        self._at.close()


def copy(source: Path, folder: Path, disk: Disk | None = None) -> Manifest:
    """Copy a checkpoint to another folder of this machine, proved. Raises what opening and `Receiver` raise."""
    files = outgoing(source, open_checkpoint(source))
    receiver = Receiver(folder, files, disk)
    try:
        for name, offset, data in parts(source, files):
            receiver.part(name, offset, data)
        return receiver.finish()
    except BaseException:
        receiver.discard()
        raise
