"""Writes and removes psctl's files on a host. The program is sent like host_state.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import sys
import tarfile
import time
from typing import Any

from psctl.launch.remote_programs.pending_orders import discard_orders, keep_orders

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

LINKED = 1_000_000
"""Bytes from which on a file of a job's code is linked into the job's folder, not copied."""

DISK_FULL = errno.ENOSPC
"""Exit status for a full disk."""

BYTECODE_HEADER = 16
"""Bytes before the code in a file of bytecode (PEP 552)."""


def make_private(folder: str) -> None:
    """Make a folder and its missing parents with mode 0700, whatever the umask.

    Raises:
        PermissionError: the folder exists, and another user may write to it.
    """
    missing, at = [], folder
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:  # another psctl made it first
            continue
        os.chmod(each, 0o700)
    found = os.stat(folder)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "another user may write into this folder", folder)


def unpack(question: Question) -> Question:
    """Unpack the archive on standard input to `folder`/`hash`, unless that exists; `bytecode` as for `copy_bytecode`.

    The hash is checked before anything is written, and the folder gets its name when it is complete.

    Raises:
        ValueError: the archive has another hash, or a member that is not permitted.
    """
    data = sys.stdin.buffer.read()
    target = os.path.join(os.path.expanduser(question["folder"]), question["hash"])
    tar = gzip.decompress(data)
    found = hashlib.sha256(tar).hexdigest()[:40]
    if found != question["hash"]:
        raise ValueError(f"the archive came as {found}, expected {question['hash']}")
    if os.path.isdir(target):
        return {"folder": target, "new": False}
    sweep_parts(os.path.dirname(target))
    part, lock = begin_part(target)
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            for member in archive:
                extract(archive, member, part)
        make_caches(part)
        if question.get("bytecode"):
            copy_bytecode(part, question["bytecode"])
        if question.get("keep"):
            with open(f"{part}.tar.gz", "wb") as file:
                file.write(data)
            os.replace(f"{part}.tar.gz", f"{target}.tar.gz")
        try:
            os.rename(part, target)
        except OSError:
            if not os.path.isdir(target):  # else another psctl has unpacked the same bytes first
                raise
    finally:
        remove_part(part)
        os.close(lock)
    return {"folder": target, "new": True}


def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: str) -> None:
    """Write one member of an archive below a folder that was empty at first, with modes 0700 or 0600.

    Python 3.11.0 to 3.11.3 have no extraction filters, so the rules are here: a member is a folder, a file or a
    symbolic link; its path lies below the folder and goes through no link; the target of a link lies below the folder.

    Raises:
        ValueError: the member breaks a rule; nothing of it was written.
    """
    parts = member.name.split("/")
    through = [os.path.join(folder, *parts[:count]) for count in range(1, len(parts))]
    path = os.path.join(folder, *parts)
    if not all(parts) or {".", ".."} & set(parts) or any(os.path.islink(each) for each in through):
        raise ValueError(f"the archive names {member.name!r}, which is not a path below its folder")
    if member.isdir():
        os.mkdir(path)
        os.chmod(path, 0o700)
    elif member.issym():
        target = member.linkname.split("/")
        down = list(itertools.dropwhile("..".__eq__, target))
        if {"", ".."} & set(down) or len(target) - len(down) >= len(parts):
            raise ValueError(f"the archive's link {member.name!r} leads to {member.linkname!r}, outside its folder")
        os.symlink(member.linkname, path)
    elif member.isreg():
        source = archive.extractfile(member)
        mode = 0o700 if member.mode & 0o100 else 0o600
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            shutil.copyfileobj(source, file)  # type: ignore[arg-type]  # a regular member has contents
    else:
        raise ValueError(f"the archive's {member.name!r} is no folder, file or symbolic link")


def make_caches(folder: str) -> None:
    """Make the folders of bytecode, because Python would make them with the umask of the user's script."""
    for at, _, files in os.walk(folder):
        if any(name.endswith(".py") for name in files):
            cache = os.path.join(at, "__pycache__")
            os.makedirs(cache, exist_ok=True)
            os.chmod(cache, 0o700)


def copy_bytecode(folder: str, known: Question) -> None:
    """Copy bytecode that another Python has compiled from the same sources, if this host sees its files.

    They are files at the sender's path, which may be another user's on this host. So no more than the sender's bytes
    are read, a pipe does not block, and nothing is used that has another digest. Copies get a header that has Python
    not compare them with the times of the sources.

    Args:
        folder: the unpacked archive.
        known: `bytecode.Bytecode` as plain data.
    """
    if (known["tag"], known["magic"]) != (sys.implementation.cache_tag, importlib.util.MAGIC_NUMBER.hex()):
        return
    found, left, digest = {}, known["bytes"], hashlib.sha256()
    try:
        for name in known["names"]:
            path = bytecode_path(known["folder"], name, known["tag"])
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found[name] = file.read(left)
            left -= len(found[name])
            digest.update(found[name])
    except OSError:  # it is another machine
        return
    if digest.hexdigest() != known["digest"]:
        return
    paths = {name: bytecode_path(folder, name, known["tag"]) for name in found}
    try:
        for name, data in found.items():
            with open(os.path.join(folder, f"{name}.py"), "rb") as source:
                of_source = importlib.util.source_hash(source.read())
            with os.fdopen(os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + of_source + data[BYTECODE_HEADER:])
    except OSError:  # a full disk: it may have space for what is needed
        for path in paths.values():
            unlink(path)


def bytecode_path(folder: str, name: str, tag: str) -> str:
    """Return the path of a module's bytecode: "psctl/units" in psctl/__pycache__/units.TAG.pyc."""
    at, module = os.path.split(name)
    return os.path.join(folder, at, "__pycache__", f"{module}.{tag}.pyc")


def begin_part(target: str) -> tuple[str, int]:
    """Make a temporary folder that is later renamed to `target`; return it and the lock that marks it as in use."""
    while True:
        part = f"{target}.{os.getpid()}.{os.urandom(4).hex()}.part"  # hosts that share a disk may have equal pids
        try:
            make_private(part)
            lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
            is_locked(lock)
            if os.path.isdir(part):
                return part, lock
            os.close(lock)
        except FileNotFoundError:  # another process removed it before it was locked
            continue


def sweep_parts(folder: str) -> None:
    """Remove the temporary folders of processes that were killed."""
    for part in glob.glob(os.path.join(glob.escape(folder), "*.part")):
        try:
            lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # its process has renamed or removed it
            continue
        if not is_locked(lock):
            remove_part(part)
        os.close(lock)
    for path in glob.glob(os.path.join(glob.escape(folder), "*.part.tar.gz")):
        if not os.path.isdir(path[: -len(".tar.gz")]):
            unlink(path)


def is_locked(descriptor: int) -> bool:
    """Lock a folder; return True if another process holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def remove_part(part: str) -> None:
    """Remove a folder that `begin_part` made, and the packed archive next to it."""
    shutil.rmtree(part, ignore_errors=True)
    unlink(f"{part}.tar.gz")


def unlink(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def begin(question: Question) -> Question:
    """Make a job's folder on this host, and store the orders from standard input until the agent has read them.

    If no agent reads them within `wait` seconds, because psctl ended, folder and orders are removed again.

    Args:
        question: `folder`: the job's folder; `claim`: whether to reserve the job's name; `wait`: seconds; `files`,
            `code`, `links`: as for `make_files`; `data`: the paths of the job's data, below the data folder.

    Returns:
        `taken`: whether another psctl has reserved the name first; `orders`: the path of the orders; `disk`: whether
        they are on a disk, because no file system in memory is usable.
    """
    folder = os.path.expanduser(question["folder"])
    parent = os.path.dirname(folder)
    make_private(os.path.dirname(parent))
    for name in ("code", "wheels"):
        sweep_parts(os.path.join(os.path.dirname(os.path.dirname(parent)), name))
    try:
        os.mkdir(parent, 0o700)
    except FileExistsError:
        if question["claim"]:
            return {"taken": True}
    make_private(folder)
    make_files(os.path.expanduser(question["files"]), os.path.expanduser(question["code"]), question["links"])
    if question["data"]:  # which data_store.py does not remove while the job runs
        with open(os.path.join(folder, "data.json"), "w", encoding="utf-8") as file:
            json.dump(question["data"], file)
    orders, disk = keep_orders(folder, sys.stdin.buffer.read())
    if os.fork() == 0:
        try:
            expire(folder, orders, question["wait"])
        finally:
            os._exit(0)
    return {"taken": False, "orders": orders, "disk": disk}


def make_files(files: str, code: str, links: list[list[str]]) -> None:
    """Make the folder in which a job's workers run, unless it exists: a job that runs again keeps what it wrote.

    The files of the code are copied, so that a script that changes one changes it for no other job; large ones are
    linked, so that they take no space.

    Args:
        files: the folder to make.
        code: the folder of the job's code.
        links: [name in `files`, path of the data].
    """
    if os.path.isdir(files):
        return
    sweep_parts(os.path.dirname(files))
    part, lock = begin_part(files)
    try:
        copy_code(code, part)
        for name, path in links:
            path = os.path.expanduser(path)
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, "the data is not here", path)
            make_private(os.path.dirname(os.path.join(part, name)))
            os.symlink(path, os.path.join(part, name))
        os.rename(part, files)
    finally:
        remove_part(part)
        os.close(lock)


def copy_code(code: str, folder: str) -> None:
    """Copy the files of a job's code to a folder, with their times; large ones are linked where that is possible."""
    for at, folders, names in os.walk(code):
        base = os.path.normpath(os.path.join(folder, os.path.relpath(at, code)))
        for name in names + [each for each in folders if os.path.islink(os.path.join(at, each))]:
            source, target = os.path.join(at, name), os.path.join(base, name)
            if not os.path.islink(source) and os.path.getsize(source) >= LINKED:
                with contextlib.suppress(OSError):  # a file system without links: it is copied
                    os.link(source, target)
                    continue
            shutil.copy2(source, target, follow_symlinks=False)
        for name in folders:
            if not os.path.islink(os.path.join(at, name)):
                os.mkdir(os.path.join(base, name), 0o700)


def expire(folder: str, orders: str, seconds: float) -> None:
    """Wait as a detached process until the agent has read its orders; after `seconds`, remove them and the folder."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    deadline = time.monotonic() + seconds
    while os.path.exists(orders):
        if time.monotonic() >= deadline and not is_starting(folder):
            discard({"folder": folder})
            return
        time.sleep(0.1)


def is_starting(folder: str) -> bool:
    """Return whether a process runs that was started with this job's orders."""
    mark = f"PSCTL_ORDERS={folder.rstrip('/')}/".encode()
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if any(item.startswith(mark) for item in file.read().split(b"\0")):
                    return True
        except OSError:  # another user's, or ended
            continue
    return False


def discard(question: Question) -> Question:
    """Remove a job's folder on this host after a submission that failed."""
    folder = os.path.expanduser(question["folder"])
    discard_orders(folder)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: another host of the cluster on this machine has its folder there
        os.rmdir(os.path.dirname(folder))
    return {}


def remove(question: Question) -> Question:
    """Remove the files that `up` made in the workdir; with `all` also jobs, checkpoints and data."""
    workdir = os.path.expanduser(question["workdir"])
    parts = ["ready.json", "code", "envs", "wheels"] + (["jobs", "checkpoints", "data"] if question["all"] else [])
    removed = []
    for part in parts:
        path = os.path.join(workdir, part)
        if os.path.isdir(path):
            shutil.rmtree(path)
            removed.append(path)
        elif os.path.exists(path):
            os.unlink(path)
            removed.append(path)
    if question["all"] and os.path.isdir(workdir) and not os.listdir(workdir):
        os.rmdir(workdir)
    return {"removed": removed}


VERBS = {"unpack": unpack, "remove": remove, "begin": begin, "discard": discard}


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    os.umask(0o077)  # files are for this user alone, whatever the umask of the login
    try:
        print(json.dumps(VERBS[verb](question)))
    except OSError as error:
        print(error, file=sys.stderr)
        return DISK_FULL if error.errno == DISK_FULL else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
