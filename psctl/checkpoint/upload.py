"""Checkpoints at a job's `checkpoint.to`: a folder or a URL that fsspec supports (s3://, gs://, sftp://, file:// ...).

The layout is that of a host, `<to>/<job>/<step>/`. An object store has no rename, so the manifest is uploaded last: a
checkpoint without it does not exist. While an upload is under way the folder also holds UPLOADED: for each file that is
there the checksum of its entry in the manifest, which has the checksums of its content. An upload that was interrupted
continues after these files. Files that a checkpoint shares with the one before are copied at the target, where it can.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.catalog import Metrics, is_step_folder, steps_to_remove
from psctl.checkpoint.copies import CheckpointReceiver, file_sizes
from psctl.checkpoint.disk import CHUNK, checksum
from psctl.checkpoint.manifest import MANIFEST, MAX_MANIFEST, STATE, Manifest, shared_files
from psctl.checkpoint.reader import folder_name, open_checkpoint

FileSystem: TypeAlias = Any
"""A file system of fsspec. Any: fsspec is not installed here, and has no types."""

UPLOADED = "uploaded.json"
"""Name of the file that holds the checksums of the files of an unfinished upload."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"} | {
    "abfss": "adlfs", "sftp": "paramiko", "ssh": "paramiko", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip


@contextmanager
def _reaching(target: str) -> Iterator[None]:
    """Turn what a file system of fsspec raises (OSError mostly, but each has its own) into one error that names it."""
    try:
        yield
    except errors.PsctlError:
        raise
    except Exception as error:
        raise errors.CheckpointIncomplete(
            f"{target}: {type(error).__name__}: {error}", hint="check checkpoint.to and the credentials", where=target
        ) from error


def _open_target(target: str) -> tuple[FileSystem, str]:
    """Return fsspec's file system and the path in it."""
    scheme = target.partition("://")[0] if "://" in target else ""
    package = _PACKAGES.get(scheme, "fsspec")
    try:
        import fsspec

        if scheme:
            fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise errors.PythonMissing(
            f"checkpoint.to: {target} needs {package}, which this Python lacks",
            hint=f"add {package} to runtime.requirements in the cluster file",
            where=target,
        ) from error
    except ValueError as error:
        raise errors.UsageError(
            f'checkpoint.to: {target}: fsspec knows no protocol "{scheme}"',
            hint="write a folder, or a URL such as s3://bucket/folder",
            where=target,
        ) from error
    with _reaching(target):
        system, path = fsspec.core.url_to_fs(target)
        return system, str(path).rstrip("/")


class CheckpointTarget:
    """A place that fsspec reaches. Every method raises CheckpointIncomplete when it refuses.

    Args:
        target: a folder or a URL.

    Raises:
        PythonMissing: this Python lacks the package of the URL's protocol. UsageError: there is no such protocol.
    """

    def __init__(self, target: str) -> None:
        self.target = target.rstrip("/")
        self._system, self._path = _open_target(target)
        self._newest: Manifest | None = None  # of what was uploaded last
        self._metrics: dict[tuple[str, int], Metrics] = {}  # of checkpoints that are there; a manifest does not change

    def place(self, job: str, step: int) -> str:
        """Return how users name the folder of a checkpoint."""
        return f"{self.target}/{job}/{folder_name(step)}"

    def upload(self, folder: Path) -> str:
        """Copy a verified checkpoint, the manifest last, without what an interrupted upload left; return where it lies.

        Raises:
            CheckpointIncomplete: the target refused or kept other sizes.
        """
        manifest = open_checkpoint(folder)
        there = self._folder(manifest.job, manifest.step)
        entries = {STATE: manifest.state} | {file.name: file for file in manifest.files}
        checksums = {name: checksum(msgspec.json.encode(entry)) for name, entry in entries.items()}
        with _reaching(f"{self.target} ({manifest.id})"):
            self._system.invalidate_cache()
            self._system.makedirs(there, exist_ok=True)
            uploaded, earlier = self._uploaded(there), self._shared(manifest)
            self._remove_file(f"{there}/{MANIFEST}")
            for name, size in file_sizes(folder, manifest).items():
                if name in checksums and uploaded.get(name) == checksums[name] and self._has(f"{there}/{name}", size):
                    continue
                if not (name in earlier and self._copy_there(earlier[name], f"{there}/{name}", size)):
                    self._system.put_file(str(folder / name), f"{there}/{name}")
                self._system.invalidate_cache()
                if not self._has(f"{there}/{name}", size):
                    raise errors.CheckpointIncomplete(
                        f"{self.target}: {name} has another size there than its {size} bytes here", where=self.target
                    )
                if name in checksums:
                    uploaded[name] = checksums[name]
                    self._system.pipe_file(f"{there}/{UPLOADED}", json.dumps(uploaded).encode())
            self._remove_file(f"{there}/{UPLOADED}")
        self._metrics[manifest.job, manifest.step] = manifest.metrics
        self._newest = manifest
        return self.place(manifest.job, manifest.step)

    def _shared(self, manifest: Manifest) -> dict[str, str]:
        """Return the files that a checkpoint shares with the one uploaded last, and their paths at the target."""
        last = self._newest
        if last is None or last.job != manifest.job:
            return {}
        return {
            name: f"{self._folder(last.job, last.step)}/{old}" for name, old in shared_files(manifest, last).items()
        }

    def _copy_there(self, old: str, new: str, size: int) -> bool:
        """Copy a file at the target; return False if the target cannot, or it was removed: then it is uploaded."""
        try:
            self._system.cp_file(old, new)
            self._system.invalidate_cache()
            return self._has(new, size)
        except Exception:  # noqa: BLE001  each file system raises its own
            return False

    def jobs(self) -> list[str]:
        """Return the jobs that have folders of checkpoints."""
        with _reaching(self.target):
            self._system.invalidate_cache()
            if not self._system.exists(self._path):
                return []
            names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._system.ls(self._path, False)]
        return sorted(name for name in names if not is_step_folder(Path(name)) and self._step_folders(name))

    def steps(self, job: str) -> list[int]:
        """Return the steps of a job's checkpoints that are complete."""
        return [step for step in self._step_folders(job) if self._is_complete(job, step)]

    def manifest(self, job: str, step: int) -> tuple[Manifest, bytes]:
        """Return a checkpoint's manifest and the bytes of its file.

        Raises:
            CheckpointCorrupt: it is none.
        """
        with (
            _reaching(f"{self.target} ({job}@{step})"),
            self._system.open(f"{self._folder(job, step)}/{MANIFEST}", "rb") as file,
        ):
            data: bytes = file.read(MAX_MANIFEST + 1)
        return manifests.decode(data, self.place(job, step)), data

    def prune(
        self, job: str, keep: int, keep_best: tuple[str, str] | None, protect: int, pending: Collection[int] = ()
    ) -> list[int]:
        """Remove a job's checkpoints by the rule of `steps_to_remove`, and unfinished ones before `protect`.

        Args:
            job, keep, keep_best, protect: as there.
            pending: steps that will be uploaded; their unfinished uploads stay.

        Returns:
            The removed steps.
        """
        found = self._step_folders(job)
        complete = [step for step in found if self._is_complete(job, step)]
        for step in complete:
            if (job, step) not in self._metrics:
                self._metrics[job, step] = self.manifest(job, step)[0].metrics
        removed = steps_to_remove([(step, self._metrics[job, step]) for step in complete], keep, keep_best, protect)
        removed += [step for step in found if step < protect and step not in complete and step not in pending]
        for step in removed:
            self.remove(job, step)
        return removed

    def remove(self, job: str, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        there = self._folder(job, step)
        with _reaching(f"{self.target} ({job}@{step})"):
            self._remove_file(f"{there}/{MANIFEST}")
            if self._system.exists(there):
                self._system.rm(there, recursive=True)
        self._metrics.pop((job, step), None)

    def fetch(self, job: str, step: int, folder: Path) -> Manifest:
        """Copy a checkpoint to a new folder of this machine, every byte verified.

        Raises:
            CheckpointCorrupt: bytes do not match its manifest.
        """
        manifest, data = self.manifest(job, step)
        receiver = CheckpointReceiver(folder, manifest.sizes() | {MANIFEST: len(data)})
        try:
            receiver.write_part(MANIFEST, 0, data)
            for name in manifest.sizes():
                take = receiver.writer_of(name)
                with (
                    _reaching(f"{self.target} ({manifest.id})"),
                    self._system.open(f"{self._folder(job, step)}/{name}", "rb") as file,
                ):
                    while block := file.read(CHUNK):
                        take(block)
            return receiver.finish()
        except BaseException:
            receiver.discard()
            raise

    def _folder(self, job: str, step: int) -> str:
        return f"{self._path}/{job}/{folder_name(step)}"

    def _step_folders(self, job: str) -> list[int]:
        with _reaching(f"{self.target} ({job})"):
            self._system.invalidate_cache()
            if not self._system.exists(f"{self._path}/{job}"):
                return []
            names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._system.ls(f"{self._path}/{job}", False)]
        return sorted(int(name) for name in names if is_step_folder(Path(name)))

    def _is_complete(self, job: str, step: int) -> bool:
        with _reaching(f"{self.target} ({job}@{step})"):
            return bool(self._system.exists(f"{self._folder(job, step)}/{MANIFEST}"))

    def _uploaded(self, there: str) -> dict[str, str]:
        """Return the checksums of the files that an interrupted upload left; {} where what it wrote is damaged."""
        if not self._system.exists(f"{there}/{UPLOADED}"):
            return {}
        try:
            found = json.loads(self._system.cat_file(f"{there}/{UPLOADED}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _has(self, path: str, size: int) -> bool:
        return bool(self._system.exists(path)) and self._system.size(path) == size

    def _remove_file(self, path: str) -> None:
        if self._system.exists(path):
            self._system.rm_file(path)
