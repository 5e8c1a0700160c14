"""An append-only file with disk space reserved beyond its end: lines are written whole even when the disk is full.

The space is allocated by fallocate(2) without changing the file's size: other files cannot use it, and readers do not
see it. On a file system without fallocate nothing is reserved, and a partial write is removed again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

KEEP_SIZE = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that mean that a disk is full, or a quota or limit is reached."""

AHEAD = 64 << 10
"""Bytes allocated beyond those needed now, so that most lines need no allocation."""


class ReservedFile:
    """A file that is appended to.

    Args:
        path: the file; its content stays.
        spare: bytes to allocate beyond its end now.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, spare: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self._end = self.size  # end of the allocated space
        self._allocate(self.size + spare)

    def append(self, data: bytes, spare: int = 0) -> bool:
        """Write all of `data` and return True; write nothing and return False if less than `spare` bytes would remain
        allocated."""
        if not self.reserve(len(data) + spare):
            return False
        try:
            written = os.write(self._file, data)
        except OSError:
            return False
        if written < len(data):  # nothing was reserved
            os.ftruncate(self._file, self.size)
            return False
        self.size += written
        return True

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes beyond the end; return whether they are allocated."""
        end = self.size + size
        return end <= self._end or self._allocate(end + AHEAD) or self._allocate(end)

    def close(self) -> None:
        """Release the space beyond the end and close the file."""
        os.ftruncate(self._file, self.size)
        os.close(self._file)

    def _allocate(self, end: int) -> bool:
        """Allocate the space up to `end`; return False when the disk is full."""
        try:
            allocate(self._file, self._end, end - self._end)
        except OSError as error:
            if error.errno in FULL:
                return False
            end = sys.maxsize  # this file system reserves nothing
        self._end = max(self._end, end)
        return True


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Allocate space without changing the file's size.

    Raises:
        OSError: the disk is full, or the file system does not support it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
