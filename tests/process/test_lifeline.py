"""Keys in a process's memory: out of core files, and out of the reach of the user's other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from psctl.launch.remote_programs import host_state

ROOT = Path(__file__).resolve().parent.parent.parent


def test_hiding_is_requested_from_the_kernel() -> None:
    code = (
        "import ctypes, resource\nfrom psctl.process import lifeline\n"
        "lifeline.hide_memory()\nlifeline.leave_no_core()\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["0", "0"]


def test_a_sweep_finds_a_process_by_the_mark_among_its_arguments(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "digits-1" / "h1"
    clean = {name: value for name, value in os.environ.items() if name != "PSCTL_ORDERS"}
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()", f"PSCTL_ORDERS={job}/"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, env=clean) as child:
        assert child.pid in host_state.processes(str(job))
        child.communicate()
