"""Stores a job's orders, with its keys and secrets, on a host until its agent reads them; sent like host_state.py.

They are kept in memory: as a new 0600 file in $XDG_RUNTIME_DIR or /dev/shm; only where neither is a file system in
memory, in the job's folder. The agent removes the file as soon as it has read it. A file that no agent read is removed
by the next psctl that inspects the host; its name contains the job's hash and the time, by a clock that is never set.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import socket
import stat
import time

ORDERS = "psctl-orders-"

UNREAD = 600
"""Seconds after which no agent will read its orders any more."""

IN_MEMORY = ("tmpfs", "ramfs")


def keep_orders(folder: str, data: bytes) -> tuple[str, bool]:
    """Write the orders of the job in `folder` to a new file; return its path, and whether it is on a disk."""
    for place in memories():
        with contextlib.suppress(OSError):  # full, or not ours to write
            return write_orders(place, folder, data), False
    return write_orders(folder, folder, data), True


def write_orders(place: str, folder: str, data: bytes) -> str:
    since = f"{time.clock_gettime(time.CLOCK_BOOTTIME):.0f}"
    words = [key_of(folder), host_word(), boot_word(), since, os.urandom(4).hex()]
    path = os.path.join(place, ORDERS + "-".join(words))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError:
        os.unlink(path)
        raise
    return path


def memories() -> list[str]:
    """Return the folders in memory where orders may wait: no other user can read, remove or replace a file of ours."""
    found = []
    for place in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):  # noqa: S108 - sticky, and files are made anew
        try:
            about = os.stat(place)
        except OSError:
            continue
        ours = about.st_uid == os.geteuid() and not about.st_mode & 0o022
        shared = about.st_uid == 0 and about.st_mode & stat.S_ISVTX
        if (ours or shared) and file_system(place) in IN_MEMORY and os.access(place, os.W_OK | os.X_OK):
            found.append(place)
    return found


def file_system(path: str) -> str:
    """Return the type of the file system that a path lies on, "" when that is not known."""
    found, longest, real = "", -1, os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape").rstrip("/")
            if len(point) >= longest and (real == point or real.startswith(point + "/")):
                found, longest = after.split()[0], len(point)  # of two on one point the later one is on top
    return found


def key_of(folder: str) -> str:
    return hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]


def boot_word() -> str:
    """Return a word that is another one after each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read()[:8]


def host_word() -> str:
    """Return a word that is another one on each host that shares this disk."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def waiting_orders(workdir: str) -> list[str]:
    """Return all files of ours in which orders wait, in memory and in the folders of jobs."""
    places = [*memories(), *glob.glob(os.path.join(glob.escape(workdir), "jobs", "*", "*"))]
    found = []
    for path in (path for place in places for path in glob.glob(os.path.join(glob.escape(place), ORDERS + "*"))):
        with contextlib.suppress(FileNotFoundError):  # its agent has just read it
            if os.lstat(path).st_uid == os.geteuid():
                found.append(path)
    return found


def orders_for(folder: str) -> list[str]:
    """Return the orders that wait for the agent of the job in `folder`, WORKDIR/jobs/JOB/HOST."""
    found = waiting_orders(os.path.dirname(os.path.dirname(os.path.dirname(folder))))
    return [path for path in found if os.path.basename(path).startswith(f"{ORDERS}{key_of(folder)}-")]


def discard_orders(folder: str) -> None:
    """Remove the orders that wait for the agent of a job."""
    for path in orders_for(folder):
        drop_orders(path)


def sweep_unread(workdir: str) -> None:
    """Remove orders that no agent will come for: this host wrote them before it was booted, or they wait too long."""
    for path in waiting_orders(workdir):
        with contextlib.suppress(FileNotFoundError, ValueError):
            if is_unread(path):
                drop_orders(path)


def is_unread(path: str) -> bool:
    """Return whether no agent will read these orders."""
    of_host, of_boot, since = os.path.basename(path).removeprefix(ORDERS).split("-")[1:4]
    if of_boot == boot_word():
        return time.clock_gettime(time.CLOCK_BOOTTIME) - float(since) > UNREAD
    return of_host == host_word() or time.time() - os.stat(path).st_mtime > UNREAD


def drop_orders(path: str) -> None:
    """Remove orders; their agent or another psctl may have removed them already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
