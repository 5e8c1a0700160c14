"""The data of jobs on a host: complete sets, parts of sets, room for more. Part of data_files and url_data.

data/NAME/       the files of a set; NAME is a hash of their names and contents
data/NAME.json   its manifest with the size, time and inode of each file here; written last
data/NAME.part/  a set that is being sent: whole/DIGEST complete files, parts/DIGEST begun ones
data/store-id    tells apart disks: hosts with the same one share it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]
"""`files`: [name, size, digest, executable]; `folders`: names; `label`: where the set comes from; `single`: its files
are one file. On a host also `kept`: [mtime in ns, inode] of each file. Any: only the standard library is there."""

SPARED = 600.0
"""Seconds since its last use in which a set is not removed to make room: a job may be about to use it."""

BLOCK = 1 << 20

ROOM = 20_000_000
"""Bytes that must stay free beside a set."""


class DataStore:
    """The data folder of a workdir.

    Args:
        workdir: psctl's folder on this host.
        jobs: folders of the jobs that run; their data is not removed.
    """

    def __init__(self, workdir: str, jobs: list[str] | None = None) -> None:
        self.folder = os.path.join(os.path.expanduser(workdir), "data")
        self._jobs = jobs or []

    def path(self, name: str, suffix: str = "") -> str:
        """Return the path of a set, or of its part, manifest or lock."""
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} names no set of data")
        return os.path.join(self.folder, name + suffix)

    def make(self) -> None:
        """Make the folder, and its id."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        path = os.path.join(self.folder, "store-id")
        if not os.path.exists(path):
            made = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
            with open(made, "w", encoding="ascii") as file:
                file.write(os.urandom(16).hex())
            with contextlib.suppress(FileExistsError):
                os.link(made, path)  # of two at once, the first one's id stays
            if not os.path.exists(path):  # a file system without links
                os.replace(made, path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)

    def id(self) -> str:
        """Return the id of the disk's folder; "" if it has none yet."""
        try:
            with open(os.path.join(self.folder, "store-id"), encoding="ascii") as file:
                return file.read()[:64]
        except OSError:
            return ""

    def manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a complete set; None if there is none."""
        path = self.path(name, ".json")
        try:
            with open(path, encoding="ascii") as file:
                found: Manifest = json.load(file)
                return found
        except (OSError, ValueError):
            return None

    def is_whole(self, name: str) -> bool:
        """Return whether a set is complete, and its files have the size, time and inode that they had; note its use."""
        manifest = self.manifest(name)
        if manifest is None:
            return False
        if "link" in manifest:
            return os.path.exists(self.path(name))
        for (inner, size, _, _), (mtime, inode) in zip(manifest["files"], manifest["kept"], strict=True):
            try:
                found = os.lstat(os.path.join(self.path(name), inner))
            except OSError:
                return False
            if (found.st_size, found.st_mtime_ns, found.st_ino) != (size, mtime, inode):
                return False
        with contextlib.suppress(OSError):
            os.utime(self.path(name, ".json"))
        return True

    def sound_files(self) -> Iterator[tuple[str, str]]:
        """Yield (digest, path) of the files of all sets here that have the size, time and inode that they had."""
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*.json")):
            name = os.path.basename(path)[: -len(".json")]
            manifest = self.manifest(name)
            if manifest is None or "link" in manifest:
                continue
            for (inner, size, digest, _), (mtime, inode) in zip(manifest["files"], manifest["kept"], strict=True):
                whole = os.path.join(self.path(name), inner)
                with contextlib.suppress(OSError):
                    found = os.lstat(whole)
                    if (found.st_size, found.st_mtime_ns, found.st_ino) == (size, mtime, inode):
                        yield digest, whole

    def finish(self, name: str, manifest: Manifest) -> None:
        """Make a complete set of a part all of whose contents are there; the set gets its name last."""
        part = self.path(name, ".part")
        tree = os.path.join(part, "tree")
        shutil.rmtree(tree, ignore_errors=True)
        os.mkdir(tree, 0o700)
        for inner in manifest["folders"]:
            os.makedirs(inside(tree, inner), mode=0o700, exist_ok=True)
        kept = []
        for inner, _, digest, executable in manifest["files"]:
            target = inside(tree, inner)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            whole = os.path.join(part, "whole", digest)
            if bool(os.stat(whole).st_mode & 0o100) == bool(executable):
                link_or_copy(whole, target)
            else:  # the same content as another file, with another mode
                shutil.copy2(whole, target)
                os.chmod(target, 0o500 if executable else 0o400)
            found = os.lstat(target)
            kept.append([found.st_mtime_ns, found.st_ino])
        self.remove(name)
        os.rename(tree, self.path(name))
        self.write_manifest(name, {**manifest, "kept": kept})
        shutil.rmtree(part, ignore_errors=True)
        self._remove_former(name, manifest["label"])

    def write_manifest(self, name: str, manifest: Manifest) -> None:
        """Write the manifest of a complete set, whole or not at all."""
        path = self.path(name, ".json")
        with open(f"{path}.new", "w", encoding="ascii") as file:
            json.dump(manifest, file)
        os.replace(f"{path}.new", path)

    def remove(self, name: str) -> None:
        """Remove a set: first its manifest, then its files."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name, ".json"))
        if os.path.islink(self.path(name)):
            os.unlink(self.path(name))
        elif os.path.isdir(self.path(name)):
            shutil.rmtree(self.path(name))

    def _removable(self) -> list[tuple[float, str, Manifest]]:
        """Return (time of the last use, name, manifest) of the sets that no job uses, the oldest first."""
        held = set()
        for job in self._jobs:
            with contextlib.suppress(OSError, ValueError), open(os.path.join(job, "data.json"), "rb") as file:
                held |= {each.partition("/")[0] for each in json.load(file)}
        found = []
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*.json")):
            name = os.path.basename(path)[: -len(".json")]
            manifest = self.manifest(name)
            with contextlib.suppress(OSError):
                used = os.stat(path).st_mtime
                if manifest is not None and name not in held and time.time() - used > SPARED:
                    found.append((used, name, manifest))
        return sorted(found, key=lambda each: each[:2])

    def _remove_former(self, name: str, label: str) -> None:
        """Remove the former states of the data that a set comes from."""
        for _, other, manifest in self._removable():
            if other != name and manifest["label"] == label:
                self.remove(other)

    def make_room(self, size: int, files: int) -> list[str]:
        """Remove sets that no job uses, those of the longest unused first, until a set has room; return their names.

        Raises:
            OSError: ENOSPC, with what is required and what is free.
        """
        removed: list[str] = []
        for _, other, _ in [*self._removable(), (0.0, "", {})]:
            found = os.statvfs(self.folder)
            free = found.f_bavail * found.f_frsize
            room = free >= size + ROOM
            if room and (not found.f_files or found.f_favail >= files + 100):
                return removed
            if other:
                self.remove(other)
                removed.append(other)
        if not room:
            text = f"the data needs {size + ROOM} bytes where {self.folder} is, and {free} are free"
            raise OSError(errno.ENOSPC, text)
        raise OSError(errno.ENOSPC, f"the data has {files} files, and {found.f_favail} can be made in {self.folder}")

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold the lock of a set's part; gives False if another process holds it."""
        with open(self.path(name, ".lock"), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks
                pass
            yield True


def inside(folder: str, name: str) -> str:
    """Return the path of a file in a folder. Raises ValueError for a name that leads out of it."""
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in name:
        raise ValueError(f"{name!r} is no path inside a folder")
    return os.path.join(folder, *parts)


def link_or_copy(source: str, target: str) -> None:
    """Link a file; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        shutil.copy2(source, target)


def hash_file(path: str) -> Any:
    """Return the SHA-256 object of a file's content. Any: hashlib names no type for it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest


def keep_whole(begun: str, whole: str, executable: bool = False) -> None:
    """Give a verified file its final mode and name."""
    os.chmod(begun, stat.S_IRUSR | (stat.S_IXUSR if executable else 0))
    os.replace(begun, whole)
