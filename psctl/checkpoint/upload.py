"""Checkpoints at a job's `checkpoint.to`: a folder or a URL that fsspec supports (s3://, gs://, file:// ...).

The layout is that of a host, `<to>/<job>/<step>/`. An object store has no rename, so the manifest is uploaded last: a
checkpoint without it does not exist. A checkpoint that `keep` removes on the head is removed there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from psctl import errors
from psctl.checkpoint.copies import file_sizes
from psctl.checkpoint.manifest import MANIFEST
from psctl.checkpoint.reader import folder_name, open_checkpoint

FileSystem: TypeAlias = Any
"""A file system of fsspec. Any: fsspec is not installed here, and has no types."""


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
    try:
        import fsspec
    except ImportError as error:
        raise errors.PythonMissing(
            f"checkpoint.to: {target} needs fsspec, which this Python lacks", hint="add it to runtime.requirements"
        ) from error
    with _reaching(target):
        system, path = fsspec.core.url_to_fs(target)
        return system, str(path).rstrip("/")


def upload_checkpoint(folder: Path, target: str) -> str:
    """Copy a verified checkpoint to `target`, the manifest last; return where it lies now.

    Raises:
        CheckpointIncomplete: the target refused or kept other sizes.
    """
    manifest = open_checkpoint(folder)
    system, path = _open_target(target)
    remote_folder = f"{path}/{manifest.job}/{folder_name(manifest.step)}"
    with _reaching(f"{target} ({manifest.id})"):
        system.makedirs(remote_folder, exist_ok=True)
        if system.exists(f"{remote_folder}/{MANIFEST}"):
            system.rm_file(f"{remote_folder}/{MANIFEST}")
        for name, size in file_sizes(folder, manifest).items():
            system.put_file(str(folder / name), f"{remote_folder}/{name}")
            found = system.size(f"{remote_folder}/{name}")
            if found != size:
                raise errors.CheckpointIncomplete(f"{target}: {name} has {found} bytes there, it has {size} here")
    return str(system.unstrip_protocol(remote_folder))


def remove_uploaded(target: str, job: str, steps: Iterable[int]) -> None:
    """Remove a job's checkpoints of these steps from `target`, each manifest first; a missing one is no fault.

    Raises:
        CheckpointIncomplete: the target refused.
    """
    system, path = _open_target(target)
    for step in steps:
        remote_folder = f"{path}/{job}/{folder_name(step)}"
        with _reaching(f"{target} ({job}@{step})"):
            if system.exists(f"{remote_folder}/{MANIFEST}"):
                system.rm_file(f"{remote_folder}/{MANIFEST}")
            if system.exists(remote_folder):
                system.rm(remote_folder, recursive=True)
