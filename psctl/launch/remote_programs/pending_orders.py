"""Stores a job's orders, with its keys and secrets, on a host until the agent reads them; sent like host_state.py.

The orders are a new file of mode 0600 in $XDG_RUNTIME_DIR or /dev/shm; if neither is a file system in memory, in the
job's folder. The agent removes the file when it has read it. A file that no agent read is removed by the next psctl
that inspects the host; its name contains a hash of the job's folder and the time since boot.
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
"""Seconds after which orders count as unread."""

IN_MEMORY = ("tmpfs", "ramfs")


def keep_orders(folder: str, data: bytes) -> tuple[str, bool]:
    """Write the orders of the job in `folder` to a new file; return its path, and whether it is on a disk."""
    for place in memories():
        with contextlib.suppress(OSError):  # full, or not writable
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
    """Return the folders in memory in which no other user can read, remove or replace this user's files."""
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
    """Return the type of the file system of a path, "" if it is unknown."""
    found, longest, real = "", -1, os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape").rstrip("/")
            if len(point) >= longest and (real == point or real.startswith(point + "/")):
                found, longest = after.split()[0], len(point)  # of two mounts on one point, the later one is on top
    return found


def key_of(folder: str) -> str:
    return hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]


def boot_word() -> str:
    """Return a word that changes with each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read()[:8]


def host_word() -> str:
    """Return a word that differs between hosts that share this disk."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def waiting_orders(workdir: str) -> list[str]:
    """Return this user's files of orders, in memory and in the folders of jobs."""
    places = [*memories(), *glob.glob(os.path.join(glob.escape(workdir), "jobs", "*", "*"))]
    found = []
    for path in (path for place in places for path in glob.glob(os.path.join(glob.escape(place), ORDERS + "*"))):
        with contextlib.suppress(FileNotFoundError):  # its agent has just read it
            if os.lstat(path).st_uid == os.geteuid():
                found.append(path)
    return found


def orders_for(folder: str) -> list[str]:
    """Return the files of orders for the job in `folder`, WORKDIR/jobs/JOB/HOST."""
    found = waiting_orders(os.path.dirname(os.path.dirname(os.path.dirname(folder))))
    return [path for path in found if os.path.basename(path).startswith(f"{ORDERS}{key_of(folder)}-")]


def discard_orders(folder: str) -> None:
    """Remove the orders for the job in `folder`."""
    for path in orders_for(folder):
        drop_orders(path)


def sweep_unread(workdir: str) -> None:
    """Remove orders that no agent will read: this host has been booted since, or they are too old."""
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
    """Remove a file of orders, unless its agent or another psctl has."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
