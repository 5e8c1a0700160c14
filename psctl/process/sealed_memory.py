"""Passes bytes from a process to its child in a sealed memfd: they are on no disk, and are freed with the processes.

The descriptor is the last part of the variable PSCTL_ORDERS, "FOLDER/worker-0:7". The part before it identifies the
job's process: a sweep searches the environments of processes for it, and FOLDER is the agent's private folder.
Only the standard library is imported here, because bootstrap.py reads orders too.
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
    """Yield a descriptor of memory with `data` that cannot be changed; it is closed here afterwards, not in a child."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def read() -> bytes | None:
    """Return the bytes passed to this process; None when psctl did not start it. They can be read again.

    Raises:
        ProcessLookupError: they were passed to another process, which started this one.
    """
    if not os.environ.get(ENVIRONMENT):
        return None
    descriptor = _descriptor()
    os.set_inheritable(descriptor, False)  # children of this process do not inherit it
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _descriptor() -> int:
    number = os.environ[ENVIRONMENT].rpartition(":")[2]
    try:
        behind = os.readlink(f"/proc/self/fd/{int(number)}")
    except (OSError, ValueError):
        behind = ""
    if not behind.startswith(f"/memfd:{_NAME}"):
        raise ProcessLookupError(
            f"{ENVIRONMENT} is inherited from the process that started this one: this process has no orders"
        )
    return int(number)
