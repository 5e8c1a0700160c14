"""The files of `data:` in a job file, as sets that are named by their content.

Links are followed: what they lead to is sent, so that a host needs nothing beside the set. A link to nothing, a link
to a folder that holds it, and what is neither file nor folder are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from psctl import errors
from psctl.launch.files.content_index import ContentIndex, FileStamp
from psctl.launch.home import DataLink, Home
from psctl.remote.shell import TransferMeter
from psctl.spec import yaml_nodes
from psctl.spec.data import DataSpec
from psctl.spec.job import JobSpec
from psctl.types import JsonObject
from psctl.units import hide_credentials

MOST_FILES = 1_000_000
"""Files of one set."""

HERE = "this machine"

HERE_PREFIX = "here-"
"""Begins the name of a set that hosts use where it is, since they are this machine."""


class DataFile(NamedTuple):
    """A file of a set."""

    name: str  # below the set's folder; may hold bytes that are no UTF-8, as os.fsdecode has them
    path: Path
    stamp: FileStamp
    digest: str
    executable: bool


class DataSet(msgspec.Struct, frozen=True):
    """What one entry of `data:` names."""

    spec: DataSpec
    name: str  # of its folder on hosts; "" for a URL, whose name follows from what hosts fetch
    label: str  # where it comes from, the same for all its states
    source: Path | None  # on this machine; None for a URL
    files: tuple[DataFile, ...] = ()
    folders: tuple[str, ...] = ()
    inner: str = ""  # the name of its one file, if it is a file and no folder

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stamp.size for file in self.files)

    @property
    def link(self) -> DataLink:
        """The link in the job's folder."""
        return DataLink(self.spec.place, f"{self.name}/{self.inner}" if self.inner else self.name)

    @property
    def manifest(self) -> bytes:
        """Its manifest, as hosts keep it."""
        files = [(each.name, each.stamp.size, each.digest, each.executable) for each in self.files]
        return json.dumps({"files": files, "folders": self.folders, "label": self.label}).encode("ascii")


def data_sets(
    job: JobSpec, text: str, home: Home, meter: TransferMeter | None, *, hashed: bool = True
) -> tuple[DataSet, ...]:
    """Return the sets of a job file.

    Args:
        job, text: the job, and its file's text.
        home: keeps the hashes of files.
        meter: shows how much has been hashed.
        hashed: whether a host needs a copy; else only the paths are looked at.

    Raises:
        InvalidFile: a path does not exist, or holds what cannot be sent; with its line. The user's fault.
    """
    found = []
    for index, spec in enumerate(job.data):
        if spec.url:
            found.append(DataSet(spec, "", f"url:{spec.source}", None))
            continue
        source = source_of(spec, job.source)
        try:
            found.append(_scan(spec, source, home, meter) if hashed else _here(spec, source))
        except errors.InvalidFile as error:
            where = position(text, job.source, index)
            raise errors.InvalidFile(f"data[{index}].from: {error.message}", error.hint, where) from error
    return tuple(found)


def source_of(spec: DataSpec, job_source: str) -> Path:
    """Return the absolute path that an entry names; a relative one starts at the job file's folder."""
    return Path(os.path.abspath(Path(job_source).parent / Path(spec.source).expanduser()))


def problems(text: str, job: JobSpec) -> list[errors.PsctlError]:
    """Return an error for each path under `data:` that does not exist on this machine."""
    found: list[errors.PsctlError] = []
    for index, spec in enumerate(job.data):
        if not spec.url and not source_of(spec, job.source).exists():
            error = _missing(source_of(spec, job.source))
            where = position(text, job.source, index)
            found.append(errors.InvalidFile(f"data[{index}].from: {error.message}", error.hint, where))
    return found


def position(text: str, source: str, index: int) -> str:
    """Return the place of an entry's `from:` in a job file: file:line:column; the file alone when --set gave it."""
    node: yaml_nodes.Node | None = yaml_nodes.parse(text, source, [])
    node = node.get("data") if isinstance(node, yaml_nodes.Mapping) else None
    if not isinstance(node, yaml_nodes.Sequence) or index >= len(node.items):
        return source
    entry = node.items[index]
    value = entry.get("from") if isinstance(entry, yaml_nodes.Mapping) else None
    return (value or entry).where


def excluded(job: JobSpec, folder: Path) -> list[str]:
    """Return patterns that leave the sources of `data:` out of the job's folder, where they lie in it."""
    found = []
    for spec in job.data:
        source = source_of(spec, job.source)
        if not spec.url and source.is_relative_to(folder) and source != folder:
            name = source.relative_to(folder).as_posix()
            found.append("/" + "".join(f"\\{each}" if each in "*?[\\" else each for each in name))
    return found


def _missing(source: Path) -> errors.InvalidFile:
    return errors.InvalidFile(f"{source} is not there", "from: is relative to the job file", str(source))


def _here(spec: DataSpec, source: Path) -> DataSet:
    """Return the set of a path that hosts which are this machine use as it is."""
    if not source.exists():
        raise _missing(source)
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
    return DataSet(spec, f"{HERE_PREFIX}{name}", str(source), source)


def _scan(spec: DataSpec, source: Path, home: Home, meter: TransferMeter | None) -> DataSet:
    found = list(_walk(source))
    files = [(name, path, info) for name, path, info in found if stat.S_ISREG(info.st_mode)]
    if len(files) > MOST_FILES:
        hint = "pack them into fewer files (tar, parquet, a database)"
        raise errors.InvalidFile(f"{source} has {len(files)} files, at most {MOST_FILES} can be sent", hint)
    key = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
    index = ContentIndex(home.root / "data" / f"{key}.json")
    stamps = [FileStamp.of(info) for _, _, info in files]
    digests = [index.known(name, stamp) for (name, _, _), stamp in zip(files, stamps, strict=True)]
    unread = sum(stamp.size for stamp, digest in zip(stamps, digests, strict=True) if digest is None)
    made = []
    uncounted: contextlib.AbstractContextManager[Callable[[int], object]] = contextlib.nullcontext(lambda _: None)
    with meter.transfer(HERE, unread) if meter is not None and unread else uncounted as count:
        try:
            for (name, path, info), stamp, digest in zip(files, stamps, digests, strict=True):
                known = digest if digest is not None else index.read(name, path, stamp, count)
                made.append(DataFile(name, path, stamp, known, bool(info.st_mode & 0o100)))
        finally:
            index.save()
    folders = tuple(name for name, _, info in found if stat.S_ISDIR(info.st_mode) and name)
    inner = "" if stat.S_ISDIR(found[0][2].st_mode) else source.name
    content = json.dumps([[(each.name, each.stamp.size, each.digest, each.executable) for each in made], folders])
    label = f"{os.uname().nodename}:{source}"
    name = hashlib.sha256(content.encode("ascii")).hexdigest()[:40]
    return DataSet(spec, name, label, source, tuple(made), folders, inner)


def _walk(source: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Yield (name, path, what it is) of a file, or of a folder and all below it, in order of name."""
    try:
        info = source.stat()
    except FileNotFoundError:
        raise _missing(source) from None
    except OSError as error:
        raise errors.InvalidFile(f"{source}: {error.strerror}", "make it readable", str(source)) from error
    if stat.S_ISREG(info.st_mode):
        yield source.name, source, info
    elif stat.S_ISDIR(info.st_mode):
        yield "", source, info
        yield from _walk_folder(source, "", [(info.st_dev, info.st_ino)])
    else:
        raise _refused(source)


def _walk_folder(folder: Path, at: str, above: list[tuple[int, int]]) -> Iterator[tuple[str, Path, os.stat_result]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise errors.InvalidFile(f"{folder}: {error.strerror}", "make it readable", str(folder)) from error
    for entry in entries:
        path, name = Path(entry.path), at + entry.name
        try:
            info = entry.stat()
        except OSError as error:
            why = f"a link to {os.readlink(path)}, which is not there" if entry.is_symlink() else error.strerror
            raise errors.InvalidFile(f"{path}: {why}", "remove it, or put what it means there", str(path)) from error
        if stat.S_ISREG(info.st_mode):
            yield name, path, info
        elif stat.S_ISDIR(info.st_mode):
            me = (info.st_dev, info.st_ino)
            if me in above:
                raise errors.InvalidFile(f"{path}: a link to a folder that holds it", "remove the link", str(path))
            yield name, path, info
            yield from _walk_folder(path, name + "/", [*above, me])
        else:
            raise _refused(path)


def _refused(path: Path) -> errors.InvalidFile:
    return errors.InvalidFile(f"{path} is neither a file nor a folder, and cannot be sent", "remove it", str(path))


def described(sets: tuple[DataSet, ...]) -> list[JsonObject]:
    """Return the `data` of a dry run."""
    return [
        {
            "from": hide_credentials(each.spec.source), "to": each.spec.place,
            "files": None if each.source is None or not each.files else len(each.files),
            "bytes": None if each.source is None or not each.files else each.size,
        }
        for each in sets
    ]  # fmt: skip
