"""A batch system's starter of processes: `step_engine.py ALLOCATION HOST COMMAND...`, a process of its own.

It starts a command on a host that the file ALLOCATION names, with a home of its own beside that file, and when the
command has ended it kills all processes that are left of it, in whatever session they are. So do srun and its like.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: orphans below this process become its children."""


def main(allocation: Path, host: str, command: list[str]) -> int:
    """Run a command and return its exit status."""
    if host not in allocation.read_text().split():
        print(f"step_engine: {host} is not in this allocation", file=sys.stderr)
        return 213
    if ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        print("step_engine: no subreaper", file=sys.stderr)
        return 214
    status = subprocess.run(command, check=False, env={**os.environ, "HOME": str(allocation.parent / host)}).returncode
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
