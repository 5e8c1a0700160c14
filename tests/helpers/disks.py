"""A disk with little space, as reserved_file.py uses it: only space that is allocated beyond a file's end counts."""

from __future__ import annotations

import errno
import os

import pytest

from psctl.process import reserved_file


class SmallDisk:
    """Replaces fallocate(2) and write(2).

    Args:
        room: bytes that can still be allocated.
        reserves: whether this file system can allocate beyond a file's end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, reserves: bool = True) -> None:
        self.room, self._reserves, self._write = room, reserves, os.write
        monkeypatch.setattr(reserved_file, "allocate", self._allocate)
        if not reserves:
            monkeypatch.setattr(os, "write", self._write_some)

    def _allocate(self, descriptor: int, offset: int, length: int) -> None:
        if not self._reserves:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if length > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= length

    def _write_some(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(descriptor, data[: self.room])
        self.room -= taken
        return taken
