"""The few operations on a disk that writing a checkpoint needs, in one class, so that tests can fail each of them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psctl import errors

CHUNK = 1 << 19
"""Bytes read at a time where a file is read in pieces."""


def new_checksum() -> hashlib.blake2b:
    """Return the running checksum of checkpoints: BLAKE2b with 32 bytes, what `b2sum -l 256` prints.

    Measured on 1 MiB blocks of an AMD EPYC: crc32 7.1 GB/s, sha256 2.1 (it has SHA instructions; about a quarter of
    that without), blake2b 1.4 with nothing special. 32 bits of crc would miss one damage in 4e9; with blake2b disk and
    network stay the limit on every 64-bit CPU. Other threads run while it works.
    """
    return hashlib.blake2b(digest_size=32)


def checksum(data: bytes) -> str:
    """Return the checksum of `data` as text."""
    running = new_checksum()
    running.update(data)
    return running.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into the error that names the file and whose fault it is.

    Raises:
        DiskFull: no space or no quota is left.
        CheckpointIncomplete: the disk refused for another reason (rights, a broken device).
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.DiskFull(
                f"no room left to write {path}", hint="free space there, or set checkpoint.to and checkpoint.keep"
            ) from error
        raise errors.CheckpointIncomplete(
            f"could not write {path}: {os.strerror(error.errno or 0)}", hint="look at the disk and the folder's rights"
        ) from error


class Disk:
    """The machine's own disk. All methods raise DiskFull or CheckpointIncomplete, as `writing` says."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents."""
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Make a new file and return its descriptor, open for reading and writing."""
        with writing(path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, path: Path, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`."""
        with writing(path):
            while data.nbytes:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def sync(self, path: Path, descriptor: int) -> None:
        """Wait until the file's bytes are on the disk."""
        with writing(path):
            os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's names are on the disk."""
        with writing(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder its final name, at once or not at all."""
        with writing(new):
            os.rename(old, new)

    def remove(self, folder: Path) -> None:
        """Remove a folder and all in it; what cannot be removed stays."""
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, path: Path, data: bytes) -> None:
        """Write a new small file and wait until it is on the disk."""
        descriptor = self.create(path)
        try:
            self.write(path, descriptor, memoryview(data), 0)
            self.sync(path, descriptor)
        finally:
            os.close(descriptor)


def pieces(path: Path, start: int, stop: int, chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield bytes [start, stop) of a file, at most `chunk` at a time; stops early where the file ends early."""
    with path.open("rb", buffering=0) as file:
        while start < stop:
            data = os.pread(file.fileno(), min(chunk, stop - start), start)
            if not data:
                return
            yield data
            start += len(data)
