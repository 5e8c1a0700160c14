"""A control group with a limit of memory, in which the kernel kills processes for lack of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.running import until

ROOT = Path("/sys/fs/cgroup")

EAT = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text("0")
kept = [bytearray(4096) for _ in range(int(sys.argv[2]) // 4096)]
time.sleep(600)
"""
"""Takes more memory than the group has, a page at a time."""


class MemoryGroup:
    """A group; `memory_limit` makes it.

    Args:
        folder: of the group.
        limit: its bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._procs, self._limit = folder / "cgroup.procs", limit
        self._eater: subprocess.Popen[bytes] | None = None

    def add(self, pid: int) -> None:
        """Move a process into the group, of which the kernel will kill it first."""
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        self._procs.write_text(str(pid))

    def fill(self) -> None:
        """Take more memory than the group has."""
        self._eater = subprocess.Popen([sys.executable, "-I", "-c", EAT, str(self._procs), str(4 * self._limit)])

    def empty(self) -> None:
        """End what takes the memory, and move all other processes out."""
        if self._eater is not None:
            self._eater.kill()
            self._eater.wait()
        for pid in self._procs.read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (self._procs.parent.parent / "cgroup.procs").write_text(pid)


def group_root() -> Path | None:
    """Return the folder in which groups with a limit of memory can be made; None where there is none."""
    first = ROOT / "memory"
    if first.is_dir():
        return first if os.access(first, os.W_OK) else None
    controllers = ROOT / "cgroup.subtree_control"
    return ROOT if controllers.exists() and "memory" in controllers.read_text().split() else None


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[MemoryGroup]:
    """Make a group whose processes have `limit` bytes of memory together; afterwards it is removed.

    Raises:
        RuntimeError: this system lets nobody make one.
    """
    root = group_root()
    if root is None:
        raise RuntimeError("no control group of memory can be made here")
    folder = root / f"psctl-test-{os.getpid()}"
    folder.mkdir()
    group = MemoryGroup(folder, limit)
    try:
        (folder / ("memory.max" if root == ROOT else "memory.limit_in_bytes")).write_text(str(limit))
        yield group
    finally:
        group.empty()
        until(lambda: _removed(folder), 30, name=f"the end of the processes in {folder}")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # a process in it has not ended yet
        return False
    return True
