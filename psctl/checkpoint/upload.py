"""Checkpoints at a job's `checkpoint.to`: a folder or a URL that fsspec knows (s3://, gs://, file:// ...).

There they lie as on a host, `<to>/<job>/<step>/`; an object store has no rename, so the manifest goes up last: a
checkpoint without it is not there. What is removed here for `keep` is removed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psctl import errors
from psctl.checkpoint.copies import file_sizes
from psctl.checkpoint.manifest import MANIFEST
from psctl.checkpoint.reader import folder_name, open_checkpoint


@contextmanager
def _reaching(target: str) -> Iterator[None]:
    """Turn what a file system of fsspec raises (OSError mostly, but each has its own) into one error that names it."""
    try:
        yield
    except errors.PsctlError:
        raise
    except Exception as error:
        raise errors.CheckpointIncomplete(
            f"{target}: {type(error).__name__}: {error}", hint="look at checkpoint.to and the credentials", where=target
        ) from error


def _open_target(target: str) -> tuple[Any, str]:
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
    place = f"{path}/{manifest.job}/{folder_name(manifest.step)}"
    with _reaching(f"{target} ({manifest.id})"):
        system.makedirs(place, exist_ok=True)
        if system.exists(f"{place}/{MANIFEST}"):
            system.rm_file(f"{place}/{MANIFEST}")
        for name, size in file_sizes(folder, manifest).items():
            system.put_file(str(folder / name), f"{place}/{name}")
            found = system.size(f"{place}/{name}")
            if found != size:
                raise errors.CheckpointIncomplete(f"{target}: {name} has {found} bytes there, it has {size} here")
    return str(system.unstrip_protocol(place))


def remove_uploaded(target: str, job: str, steps: Iterable[int]) -> None:
    """Remove a job's checkpoints of these steps from `target`, each manifest first; a missing one is no fault.

    Raises:
        CheckpointIncomplete: the target refused.
    """
    system, path = _open_target(target)
    for step in steps:
        place = f"{path}/{job}/{folder_name(step)}"
        with _reaching(f"{target} ({job}@{step})"):
            if system.exists(f"{place}/{MANIFEST}"):
                system.rm_file(f"{place}/{MANIFEST}")
            if system.exists(place):
                system.rm(place, recursive=True)
