"""Writes a checkpoint so that it is complete or absent, whichever process is killed meanwhile.

Everything is written to a folder next to the final one, named `STEP.HOST.PID.partial`:

    open_file, write_part*, finish_file   for each sender, interleaved: one safetensors file each, synced at its end
    link_files                            for a sender whose part continues that of an earlier checkpoint
    commit                                state.json, then manifest.json, each synced; then the folder's names; then one
                                          rename gives the folder its final name; then the parent folder's names

A folder without `.partial` therefore always has its manifest, and a manifest only names bytes that were on the disk
before it. The files of a killed writer or copier end in `.partial` (or `.export`) and are never listed;
`remove_abandoned` removes them.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import psctl
from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.disk import Disk, checksum, locked
from psctl.checkpoint.manifest import Manifest, StateFile, TensorFile
from psctl.checkpoint.partial_files import Buffer, PartialTensorFile
from psctl.checkpoint.reader import open_checkpoint, verify
from psctl.checkpoint.state_file import encode_state
from psctl.types import State, TensorSlice

PARTIAL = ".partial"

_SOURCE = re.compile(r"[a-z]+/[0-9]+")
EXPORT_SUFFIX = ".export"

QUIET = 86400.0
"""Seconds without a change after which files of another host's process, or of an unknown one, count as abandoned."""

_LEFT_NAME = re.compile(r"[0-9]{10,}[.-].+\.(?:partial|export)")
_WRITER = re.compile(r"\.([0-9]+)\.partial\Z")


def partial_path(folder: Path) -> Path:
    """Return the path under which this process writes what becomes `folder`."""
    return folder.with_name(f"{folder.name}.{os.uname().nodename}.{os.getpid()}{PARTIAL}")


def publish(partial: Path, folder: Path, disk: Disk) -> None:
    """Give a finished folder its final name.

    A complete checkpoint that already has that name is kept, and the new one is dropped: two folders cannot be
    exchanged in one step, and there must be no moment without either. A damaged one is replaced.
    """
    disk.sync_folder(partial)
    if folder.exists():
        if not verify(folder):
            disk.remove(partial)
            return
        damaged = partial_path(folder.with_name(f"{folder.name}-damaged"))
        disk.remove(damaged)
        disk.rename(folder, damaged)
        disk.rename(partial, folder)
        disk.remove(damaged)
    else:
        disk.rename(partial, folder)
    disk.sync_folder(folder.parent)


def remove_abandoned(root: Path, disk: Disk | None = None) -> list[str]:
    """Remove the files of writers and copiers that were killed, in the folders of all jobs; return their names.

    Files of a running process stay: it holds the lock of its folder. The disk may be shared, and some have no such
    locks; without a lock the writer must be an ended process of this host, or nothing has changed for QUIET seconds.

    Args:
        root: `<workdir>/checkpoints`.
        disk: for tests.
    """
    removed = []
    for job in sorted(root.iterdir()) if root.is_dir() else []:
        for path in sorted(job.iterdir()) if job.is_dir() and not job.is_symlink() else []:
            if _LEFT_NAME.fullmatch(path.name) and _abandoned(path):
                removed += _removed(path, disk or Disk())
    return removed


def remove_abandoned_for(target: Path, disk: Disk | None = None) -> list[str]:
    """Remove the files of processes that were killed while they wrote `target`; return their names."""
    around = target.parent.glob(f"{glob.escape(target.name)}.*{PARTIAL}") if target.parent.is_dir() else []
    return [name for path in sorted(around) if _abandoned(path) for name in _removed(path, disk or Disk())]


def _removed(path: Path, disk: Disk) -> list[str]:
    if stat.S_ISDIR(path.lstat().st_mode):
        disk.remove(path)
    else:
        path.unlink(missing_ok=True)
    return [path.name]


def _abandoned(path: Path) -> bool:
    """Return whether no process writes there any more; False for a link, which psctl never makes."""
    try:
        kind = path.lstat().st_mode
        if not (stat.S_ISREG(kind) or (stat.S_ISDIR(kind) and not locked(path))):
            return False
        match = _WRITER.search(path.name)
        ours = match is not None and path.name[: match.start()].endswith(f".{os.uname().nodename}")
        if match is not None and ours and not Path("/proc", match[1]).exists():
            return True
        changed = [each.lstat().st_mtime for each in (path, *(path.iterdir() if stat.S_ISDIR(kind) else ()))]
    except FileNotFoundError:  # it was finished, or another process removed it
        return False
    return bool(time.time() - max(changed) > QUIET)


class PartialFolder:
    """The new folder in which a checkpoint is written until it gets its final name; it is locked until then.

    Args:
        folder: the final name.
        disk: where it is written.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.path = partial_path(folder)
        self._folder, self._disk = folder, disk
        disk.remove(self.path)
        self.descriptor = disk.make_folder(self.path)

    def publish(self) -> None:
        """Give it its final name; see `publish`."""
        publish(self.path, self._folder, self._disk)
        self._unlock()

    def discard(self) -> None:
        """Remove it; harmless after `publish`."""
        self._disk.remove(self.path)
        self._unlock()

    def _unlock(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class CheckpointWriter:
    """Writes one checkpoint while its parts arrive from several senders, interleaved; safe for one thread a sender.

    Args:
        folder: its final name, `<root>/<job>/<step as 10 digits>`; parents are made.
        job, step: the job and its step.
        disk: for tests.

    Every method raises DiskFull or CheckpointIncomplete when the disk refuses; after any error call `discard`.
    """

    def __init__(self, folder: Path, job: str, step: int, disk: Disk | None = None) -> None:
        self.folder, self.job, self.step = folder, job, step
        self._disk = disk or Disk()
        self._partial = PartialFolder(folder, self._disk)
        self._lock = threading.Lock()
        self._partials: dict[str, PartialTensorFile] = {}
        self._files: dict[str, TensorFile] = {}
        self._linked: dict[str, TensorFile] = {}  # by name

    def open_file(self, source: str, slices: Sequence[TensorSlice]) -> None:
        """Make the file of a sender ("worker/0", "server/1") for the slices that it will send.

        Raises:
            CheckpointCorrupt: the sender has a file already, or its slices do not fit together.
            UsageError: a dtype that checkpoints cannot hold.
        """
        if not _SOURCE.fullmatch(source):
            raise errors.CheckpointCorrupt(f"{source!r} is no sender of a checkpoint")
        with self._lock:
            if source in self._partials:
                raise errors.CheckpointCorrupt(f"{source} began the checkpoint of step {self.step} twice")
            path = self._partial.path / (source.replace("/", "-") + ".safetensors")
            metadata = {"format": "pt", "psctl": f"{self.job}@{self.step} {source}"}
            self._partials[source] = PartialTensorFile(
                source, path, self._partial.descriptor, slices, metadata, self._disk
            )

    def link_files(self, source: str, folder: Path) -> list[str]:
        """Include the files of a sender in an earlier checkpoint, which what it sends now continues.

        Args:
            source: the sender.
            folder: of the earlier checkpoint.

        Returns:
            The names of the tensors in these files.

        Raises:
            CheckpointIncomplete: there is no such checkpoint, or it has no file of the sender.
        """
        entries = manifests.files_of(open_checkpoint(folder), source)
        if not entries:
            raise errors.CheckpointIncomplete(f"{folder} has no part of {source}, which its next one continues")
        for name, entry in entries.items():
            self._disk.link(folder / name, self._partial.path / entry.name, self._partial.descriptor)
        with self._lock:
            self._linked |= {entry.name: entry for entry in entries.values()}
        return [piece.name for entry in entries.values() for piece in entry.slices]

    @property
    def linked(self) -> frozenset[str]:
        """Names of the files of earlier checkpoints."""
        with self._lock:
            return frozenset(self._linked)

    def write_part(self, source: str, index: int, offset: int, data: Buffer) -> None:
        """Write bytes of slice number `index` of a sender, from byte `offset` of that slice."""
        self._file_of(source).write_part(index, offset, data)

    def finish_file(self, source: str) -> None:
        """Check that a sender has sent all bytes, and sync its file. CheckpointIncomplete when bytes are missing."""
        file = self._file_of(source)
        entry = file.finish()
        with self._lock:
            self._files[source] = entry

    def _file_of(self, source: str) -> PartialTensorFile:
        with self._lock:
            if source not in self._partials or source in self._files:
                raise errors.CheckpointCorrupt(f"{source} sent a part of step {self.step} before begin or after end")
            return self._partials[source]

    def commit(
        self,
        *,
        time: float,
        world: int,
        servers: int,
        strategy: str,
        update: str,
        seed: int,
        epoch: int,
        state: State,
        metrics: Mapping[str, float],
        code_hash: str,
        job_file: str,
        sign: manifests.Sign | None = None,
    ) -> Manifest:
        """Complete the checkpoint: check that all tensors are covered once, write the manifest, rename the folder.

        Args:
            time: seconds since the epoch.
            state: rank 0's state, JSON values.
            metrics: of that step; those that are not finite are kept as null.
            sign: signs the manifest for the job's authority; None: it stays unsigned.

        Raises:
            CheckpointIncomplete: a sender did not end, or a tensor has a hole.
            CheckpointCorrupt: slices overlap or senders disagree.
            UsageError: the state is no JSON.
        """
        with self._lock:
            waited = sorted(set(self._partials) - set(self._files))
            if waited:
                raise errors.CheckpointIncomplete(f"step {self.step}: {', '.join(waited)} did not send all")
            linked = [self._linked[name] for name in sorted(self._linked)]
            entries = (*(self._files[source] for source in sorted(self._files)), *linked)
        for problem in manifests.uncovered(entries):
            raise problem.error(f"{self.job}@{self.step}")
        text = encode_state(state)
        manifest = Manifest(
            format=manifests.LINKED_FORMAT if linked else manifests.FORMAT,
            job=self.job, step=self.step, epoch=epoch, time=time, version=psctl.__version__, world=world,
            servers=servers, strategy=strategy, update=update, seed=seed, code_hash=code_hash,
            metrics={name: value if isfinite(value) else None for name, value in metrics.items()},
            job_file=job_file, state=StateFile(len(text), checksum(text)), files=entries,
        )  # fmt: skip
        for name, data in ((manifests.STATE, text), (manifests.MANIFEST, manifests.encode(manifest, sign))):
            self._disk.put(self._partial.path / name, data, self._partial.descriptor)
        self._partial.publish()
        return manifest

    def discard(self) -> None:
        """Remove what was written; harmless after commit."""
        with self._lock:
            partials = list(self._partials.values())
        for file in partials:
            file.file.close()
        self._partial.discard()
