"""Writing a checkpoint so that it is whole or absent, whatever dies in between.

All is written to a folder beside the final one, named `STEP.HOST.PID.partial`:

    begin, part*, end   for each sender, interleaved     one safetensors file each, brought to the disk by `end`
    commit              state.json, manifest.json last, each brought to the disk; then the folder's names;
                        then one rename gives the folder its final name; then the parent folder's names

A folder without `.partial` therefore always has its manifest, and a manifest only ever names bytes that were on the
disk before it. What a killed writer or copier leaves ends in `.partial` (or `.export`) and is never listed; `sweep`
removes it.
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
from typing import Any

import psctl
from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.disk import Disk, checksum, locked
from psctl.checkpoint.landing import Buffer, Held, Landing
from psctl.checkpoint.manifest import Manifest, StateFile, TensorFile
from psctl.checkpoint.reader import verify
from psctl.checkpoint.state import encode_state
from psctl.types import TensorSlice

PARTIAL = ".partial"

_SOURCE = re.compile(r"[a-z]+/[0-9]+")
EXPORT = ".export"

QUIET = 86400.0
"""Seconds without a change after which what another host's process, or nobody knows whose, was writing is given up."""

_LEFT_NAME = re.compile(r"[0-9]{10,}[.-].+\.(?:partial|export)")
_WRITER = re.compile(r"\.([0-9]+)\.partial\Z")


def temporary(folder: Path) -> Path:
    """Return where this process writes what will become `folder`."""
    return folder.with_name(f"{folder.name}.{os.uname().nodename}.{os.getpid()}{PARTIAL}")


def publish(partial: Path, folder: Path, disk: Disk) -> None:
    """Give a finished folder its final name, for good.

    A whole checkpoint that has that name already stays, and the new one is dropped: two folders cannot be exchanged in
    one act, and there must be no moment without either. A damaged one makes way.
    """
    disk.sync_folder(partial)
    if folder.exists():
        if not verify(folder):
            disk.remove(partial)
            return
        aside = temporary(folder.with_name(f"{folder.name}-damaged"))
        disk.remove(aside)
        disk.rename(folder, aside)
        disk.rename(partial, folder)
        disk.remove(aside)
    else:
        disk.rename(partial, folder)
    disk.sync_folder(folder.parent)


def sweep(root: Path, disk: Disk | None = None) -> list[str]:
    """Remove what dead writers and copiers left in the folders of all jobs; return the names.

    What a living process writes stays: it holds the lock of its folder. The disk may be shared, and some have no such
    locks; so without a lock it is a process of this host that must be gone, or nothing has changed for QUIET seconds.

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


def sweep_beside(target: Path, disk: Disk | None = None) -> list[str]:
    """Remove what dead processes left that were writing `target`; return the names."""
    around = target.parent.glob(f"{glob.escape(target.name)}.*{PARTIAL}") if target.parent.is_dir() else []
    return [name for path in sorted(around) if _abandoned(path) for name in _removed(path, disk or Disk())]


def _removed(path: Path, disk: Disk) -> list[str]:
    if stat.S_ISDIR(path.lstat().st_mode):
        disk.remove(path)
    else:
        path.unlink(missing_ok=True)
    return [path.name]


def _abandoned(path: Path) -> bool:
    """Tell whether nobody writes there any more; a link is none of ours."""
    try:
        kind = path.lstat().st_mode
        if not (stat.S_ISREG(kind) or (stat.S_ISDIR(kind) and not locked(path))):
            return False
        match = _WRITER.search(path.name)
        ours = match is not None and path.name[: match.start()].endswith(f".{os.uname().nodename}")
        if match is not None and ours and not Path("/proc", match[1]).exists():
            return True
        changed = [each.lstat().st_mtime for each in (path, *(path.iterdir() if stat.S_ISDIR(kind) else ()))]
    except FileNotFoundError:  # it was finished, or swept by somebody else
        return False
    return bool(time.time() - max(changed) > QUIET)


class Writer:
    """One checkpoint while its parts arrive from several senders, interleaved; safe for one thread a sender.

    Args:
        folder: its final name, `<root>/<job>/<step as 10 digits>`; parents are made.
        job, step: what it is a checkpoint of.
        disk: for tests.

    Every method raises DiskFull or CheckpointIncomplete when the disk refuses; after any error call `discard`.
    """

    def __init__(self, folder: Path, job: str, step: int, disk: Disk | None = None) -> None:
        self.folder, self.job, self.step = folder, job, step
        self._disk = disk or Disk()
        self._partial = temporary(folder)
        self._lock = threading.Lock()
        self._landings: dict[str, Landing] = {}
        self._files: dict[str, TensorFile] = {}
        self._disk.remove(self._partial)
        self._at = Held(self._disk.make_folder(self._partial))

    def begin(self, source: str, slices: Sequence[TensorSlice]) -> None:
        """Make the file of a sender ("worker/0", "server/1") that will send these slices.

        Raises:
            CheckpointCorrupt: the sender began before, or its slices do not fit together.
            UsageError: a dtype that checkpoints cannot hold.
        """
        if not _SOURCE.fullmatch(source):
            raise errors.CheckpointCorrupt(f"{source!r} is no sender of a checkpoint")
        with self._lock:
            if source in self._landings:
                raise errors.CheckpointCorrupt(f"{source} began the checkpoint of step {self.step} twice")
            path = self._partial / (source.replace("/", "-") + ".safetensors")
            metadata = {"format": "pt", "psctl": f"{self.job}@{self.step} {source}"}
            self._landings[source] = Landing(source, path, self._at.descriptor, slices, metadata, self._disk)

    def part(self, source: str, index: int, offset: int, data: Buffer) -> None:
        """Write bytes of slice number `index` of a sender, from byte `offset` of that slice."""
        self._landing(source).part(index, offset, data)

    def end(self, source: str) -> None:
        """A sender has sent all: prove it and bring its file to the disk. CheckpointIncomplete when bytes miss."""
        landing = self._landing(source)
        entry = landing.finish()
        with self._lock:
            self._files[source] = entry

    def _landing(self, source: str) -> Landing:
        with self._lock:
            if source not in self._landings or source in self._files:
                raise errors.CheckpointCorrupt(f"{source} sent a part of step {self.step} before begin or after end")
            return self._landings[source]

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
        state: dict[str, Any],
        metrics: Mapping[str, float],
        code_hash: str,
        job_file: str,
        sign: manifests.Sign | None = None,
    ) -> Manifest:
        """Make the checkpoint whole: all senders ended, every tensor covered once, manifest written, name given.

        Args:
            time: seconds since the epoch.
            state: rank 0's, JSON values.
            metrics: of that step; those that are no finite number are kept as null.
            sign: signs the manifest for the job's authority; None: it stays unsigned.

        Raises:
            CheckpointIncomplete: a sender did not end, or a tensor has a hole.
            CheckpointCorrupt: slices overlap or senders disagree.
            UsageError: the state is no JSON.
        """
        with self._lock:
            waited = sorted(set(self._landings) - set(self._files))
            if waited:
                raise errors.CheckpointIncomplete(f"step {self.step}: {', '.join(waited)} did not send all")
            entries = tuple(self._files[source] for source in sorted(self._files))
        for problem in manifests.uncovered(entries):
            raise problem.error(f"{self.job}@{self.step}")
        text = encode_state(state)
        manifest = Manifest(
            format=manifests.FORMAT, job=self.job, step=self.step, epoch=epoch, time=time, version=psctl.__version__,
            world=world, servers=servers, strategy=strategy, update=update, seed=seed, code_hash=code_hash,
            metrics={name: value if isfinite(value) else None for name, value in metrics.items()},
            job_file=job_file, state=StateFile(len(text), checksum(text)), files=entries,
        )  # fmt: skip
        self._disk.put(self._partial / manifests.STATE, text, self._at.descriptor)
        self._disk.put(self._partial / manifests.MANIFEST, manifests.encode(manifest, sign), self._at.descriptor)
        publish(self._partial, self.folder, self._disk)
        self._at.close()
        return manifest

    def discard(self) -> None:
        """Give it up and remove what was written; harmless after commit."""
        with self._lock:
            landings = list(self._landings.values())
        for landing in landings:
            landing.file.close()
        self._disk.remove(self._partial)
        self._at.close()
