"""The part of psctl's program for hosts that tells of the machine: which one it is, and the room on its disk."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os


def machine_id(root: str = "/") -> str:
    """Return a hash of what a machine keeps over reboots and loses when it is installed anew or replaced.

    It covers the id of its installation and the hardware addresses of its network cards.

    Args:
        root: where its file system is.
    """
    found = []
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError), open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
            found.append(file.read().strip())
            break
    # cards only: bridges and tunnels draw new addresses at each boot
    for device in sorted(glob.glob(os.path.join(root, "sys/class/net/*/device"))):
        folder = os.path.dirname(device)
        # a card in a bond shows the bond's address
        for path in ("bonding_slave/perm_hwaddr", "address"):
            with contextlib.suppress(OSError), open(os.path.join(folder, path), encoding="ascii") as file:
                found.append(file.read().strip())
                break
    return hashlib.sha256("\n".join(["psctl", *found]).encode()).hexdigest()[:16]


def free_space(path: str) -> int:
    """Return the bytes left on the disk where `path` is or would be."""
    found = os.statvfs(existing(path))
    return found.f_bavail * found.f_frsize


def free_inodes(path: str) -> int | None:
    """Return how many files can still be made where `path` is or would be; None where the file system has no limit."""
    found = os.statvfs(existing(path))
    return found.f_favail if found.f_files else None


def writable(path: str) -> bool:
    """Tell whether `path` can be written or made."""
    return os.access(existing(path), os.W_OK | os.X_OK)


def existing(path: str) -> str:
    """Return the folder nearest above `path` that is there, or `path` itself."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path
