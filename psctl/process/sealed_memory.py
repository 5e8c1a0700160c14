"""Bytes handed from a process to its child in a sealed memfd: they are on no disk, and gone with the processes.

The child finds the descriptor at the end of the variable PSCTL_ORDERS, "FOLDER/worker-0:7". What stands before it tells
whose process this is: a sweep looks for it in the environments of processes, and FOLDER is the agent's private folder.
Only the standard library is imported here, for bootstrap.py reads orders too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

ENVIRONMENT = "PSCTL_ORDERS"

_NAME = "psctl-orders"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@contextlib.contextmanager
def holding(data: bytes) -> Iterator[int]:
    """Give a descriptor behind which `data` can be read and not changed; it is closed at the end, a child's is not."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def read() -> bytes | None:
    """Return what this process was handed; None when psctl did not start it. It can be read again.

    Raises:
        ProcessLookupError: it was handed to another process, which started this one.
    """
    if not os.environ.get(ENVIRONMENT):
        return None
    descriptor = _descriptor()
    os.set_inheritable(descriptor, False)  # not for what this process starts in turn
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _descriptor() -> int:
    number = os.environ[ENVIRONMENT].rpartition(":")[2]
    try:
        behind = os.readlink(f"/proc/self/fd/{int(number)}")
    except (OSError, ValueError):
        behind = ""
    if not behind.startswith(f"/memfd:{_NAME}"):
        raise ProcessLookupError(
            f"{ENVIRONMENT} is that of the process which started this one: its orders are not here"
        )
    return int(number)
