"""An append-only file that owns disk space beyond its end, so that a full disk tears no line and takes the last ones.

The space is allocated by fallocate(2) without changing the file's size: nobody else can use it, and readers do not see
it. On a file system that cannot do so nothing is reserved, and what does not fit is taken back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

KEEP_SIZE = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that is reached."""

AHEAD = 64 << 10
"""Bytes allocated beyond what is needed now, so that not every line costs a system call more."""


class ReservedFile:
    """A file that is appended to. OSError from the constructor: it cannot be made.

    Args:
        path: the file; what it holds stays.
        spare: bytes beyond its end that are allocated now.
    """

    def __init__(self, path: Path, spare: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self._end = self.size  # of the allocated space
        self._allocate(self.size + spare)

    def append(self, data: bytes, spare: int = 0) -> bool:
        """Write all of `data`, or nothing and return False: less than `spare` bytes would be left allocated then."""
        if not self.has_room(len(data) + spare):
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

    def has_room(self, size: int) -> bool:
        """Tell whether `size` bytes beyond the end are allocated now."""
        end = self.size + size
        return end <= self._end or self._allocate(end + AHEAD) or self._allocate(end)

    def close(self) -> None:
        """Give the space beyond the end back."""
        os.ftruncate(self._file, self.size)
        os.close(self._file)

    def _allocate(self, end: int) -> bool:
        """Own the space up to `end`; False when the disk is full."""
        try:
            _fallocate(self._file, self._end, end - self._end)
        except OSError as error:
            if error.errno in FULL:
                return False
            end = sys.maxsize  # this file system reserves nothing
        self._end = max(self._end, end)
        return True


def _fallocate(descriptor: int, offset: int, length: int) -> None:
    """Allocate space without changing the file's size. OSError: there is none, or it cannot be done there."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
