"""The disk operations of checkpoints. Those that write are one class, so that tests can make each fail.

Files that are read may have been made by another user, so only regular files are opened: no link is followed, no pipe
or device is opened. Files are written into a new folder, through its open descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
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
    """Turn an OSError into the error that names the file and the cause.

    Raises:
        DiskFull: no space or no quota is left.
        CheckpointIncomplete: the disk refused for another reason (rights, a broken device).
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.DiskFull(
                f"no space left to write {path}", hint="free space there, or set checkpoint.to and checkpoint.keep"
            ) from error
        raise errors.CheckpointIncomplete(
            f"could not write {path}: {os.strerror(error.errno or 0)}",
            hint="check the disk and the folder's permissions",
        ) from error


class Disk:
    """This machine's disk. All methods raise DiskFull or CheckpointIncomplete, as `writing` does."""

    def make_folder(self, path: Path) -> int:
        """Make a new folder, and its parents where they are missing, for this user alone, whatever the umask.

        Returns:
            Its descriptor, to create files in it. While it is open the folder is locked: `remove_abandoned` in any
            process or container of this machine leaves a locked folder alone.
        """
        with writing(path):
            for folder in reversed([each for each in path.parents if not each.is_dir()]):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700)
            os.mkdir(path, 0o700)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchmod(descriptor, 0o700)
            with contextlib.suppress(
                OSError
            ):  # a disk without such locks (NFS): the folder's name contains the writer's process id
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor

    def create(self, path: Path, folder: int | None = None) -> int:
        """Make a new file that this user alone may read; return its descriptor, open for reading and writing.

        Args:
            path: of the file.
            folder: descriptor of the folder that it is made in, whatever has that folder's name by now.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with writing(path):
            return os.open(path if folder is None else path.name, flags, 0o600, dir_fd=folder)

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
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # SMB and others write names at once
                    raise
            finally:
                os.close(descriptor)

    def link(self, old: Path, path: Path, folder: int) -> None:
        """Give a file that is on the disk a second name; where the disk has no such links, copy it.

        Args:
            old: the file.
            path: the second name.
            folder: as for `create`.

        Raises:
            CheckpointIncomplete: the file was removed.
        """
        try:
            os.link(old, path.name, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError as error:
            raise errors.CheckpointIncomplete(f"{old} was removed", hint="psctl checkpoint list") from error
        except OSError:
            self._copy(old, path, folder)

    def _copy(self, old: Path, path: Path, folder: int) -> None:
        descriptor, offset = self.create(path, folder), 0
        try:
            with writing(path):
                for data in pieces(old, 0, regular_size(old)):
                    self.write(path, descriptor, memoryview(data), offset)
                    offset += len(data)
            self.sync(path, descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder its final name, at once or not at all."""
        with writing(new):
            os.rename(old, new)

    def remove(self, folder: Path) -> None:
        """Remove a folder and all in it; what cannot be removed stays."""
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, path: Path, data: bytes, folder: int | None = None) -> None:
        """Write a new small file and wait until it is on the disk; `folder` as for `create`."""
        descriptor = self.create(path, folder)
        try:
            self.write(path, descriptor, memoryview(data), 0)
            self.sync(path, descriptor)
        finally:
            os.close(descriptor)


def locked(folder: Path) -> bool:
    """Return whether a process writes a folder that `Disk.make_folder` made. OSError as the system has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk without such locks
        return False
    finally:
        os.close(descriptor)
    return False


class Unfit(OSError):
    """A path is a link, a pipe, a device or a folder, or a file has too many bytes; strerror contains which."""


def regular_size(path: Path) -> int:
    """Return the number of bytes of a regular file. OSError as the system has it, Unfit for anything else."""
    return _size(path, path.lstat())


def _size(path: Path, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise Unfit(errno.EINVAL, "it is no regular file", str(path))
    return found.st_size


@contextmanager
def reading(path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file; give its descriptor and its bytes. OSError as `regular_size`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise Unfit(errno.EINVAL, "it is no regular file", str(path)) from error
        raise
    try:
        yield descriptor, _size(path, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def content(path: Path, most: int) -> bytes:
    """Return all bytes of a regular file that has `most` of them at most. OSError as `regular_size`."""
    with reading(path) as (descriptor, size):
        if size > most:
            raise Unfit(errno.EFBIG, f"it has {size} bytes, more than any may", str(path))
        return b"".join(_pieces(descriptor, 0, size, CHUNK))


def pieces(path: Path, start: int, stop: int, chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield bytes [start, stop) of a regular file, at most `chunk` at a time; stops early where the file ends early."""
    with reading(path) as (descriptor, _):
        yield from _pieces(descriptor, start, stop, chunk)


def _pieces(descriptor: int, start: int, stop: int, chunk: int) -> Iterator[bytes]:
    while start < stop:
        data = os.pread(descriptor, min(chunk, stop - start), start)
        if not data:
            return
        yield data
        start += len(data)
