"""Hashes of files of this machine, kept while size, times and inode are unchanged.

A file that was changed shortly before it was hashed is hashed again the next time: a later change could fall on the
same time stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from psctl.errors import InvalidFile
from psctl.launch.home import write_atomic

COARSE, FINE = 2.0, 0.1
"""Seconds of the time stamps of file systems: those with whole seconds, and all others."""

BLOCK = 1 << 20


class FileStamp(NamedTuple):
    """What changes with a file's content."""

    size: int
    mtime: int  # ns
    ctime: int  # ns
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        """Return the stamp of a file."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def settled(self, now: float) -> bool:
        """Return whether a later change of the file must show in its stamp."""
        grain = COARSE if self.mtime % 10**9 == 0 else FINE
        return max(self.mtime, self.ctime) / 1e9 < now - grain


class ContentIndex:
    """The hashes of the files below one folder.

    Args:
        path: the file that keeps them; a missing or damaged one holds none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[FileStamp, str]] = {}
        self._used: dict[str, tuple[FileStamp, str]] = {}
        self._changed = False
        try:
            for name, (stamp, digest) in json.loads(path.read_text(encoding="ascii")).items():
                self._known[name] = (FileStamp(*stamp), str(digest))
        except (OSError, ValueError, TypeError, AttributeError):
            self._known = {}

    def known(self, name: str, stamp: FileStamp) -> str | None:
        """Return the hash of a file that has this stamp; None if it must be read."""
        found = self._known.get(name)
        if found is None or found[0] != stamp:
            return None
        self._used[name] = found
        return found[1]

    def read(self, name: str, path: Path, stamp: FileStamp, count: Callable[[int], object]) -> str:
        """Read a file and return its hash.

        Args:
            name: its name in the index.
            path: the file.
            stamp: what it was found with.
            count: called with each number of bytes that was read.

        Raises:
            InvalidFile: it changed meanwhile, or cannot be read.
        """
        now, digest = time.time(), hashlib.sha256()
        try:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    count(len(block))
                after = FileStamp.of(os.fstat(file.fileno()))
        except OSError as error:
            raise InvalidFile(f"{path}: {error.strerror}", "make it readable, or leave it out", str(path)) from error
        if after != stamp:
            raise changed(path)
        self._changed = True
        if stamp.settled(now):
            self._used[name] = (stamp, digest.hexdigest())
        return digest.hexdigest()

    def save(self) -> None:
        """Keep the hashes of the files that were asked for; others are gone."""
        if self._changed or len(self._used) != len(self._known):
            document = {name: [list(stamp), digest] for name, (stamp, digest) in self._used.items()}
            write_atomic(self._path, json.dumps(document).encode("ascii"))


def changed(path: Path) -> InvalidFile:
    """Return the error for a file that was written while psctl read it."""
    return InvalidFile(
        f"{path} changed while it was read", "run it again when nothing writes to the data any more", str(path)
    )
