"""Keys in a process's memory: out of core files, and out of the reach of the user's other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psctl.launch.remote_programs import host_state

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("options", "dumpable"),
    [
        ("rw,relatime", "0"),
        ("rw,hidepid=off", "0"),
        ("rw,hidepid=2", "1"),
        ("rw,relatime,gid=4,hidepid=invisible", "1"),
        ("rw,hidepid=2 0 0\nproc /proc proc rw", "0"),  # the mount on top counts
    ],
)
def test_memory_is_hidden_where_the_user_still_sees_the_process(options: str, dumpable: str, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(f"sysfs /sys sysfs rw 0 0\nproc /proc proc {options} 0 0\nnone /x proc rw 0 0\n")
    code = (
        "import ctypes, resource, sys\nfrom psctl.process import lifeline\n"
        "lifeline.hide_memory(sys.argv[1])\nlifeline.leave_no_core()\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "mounts")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [dumpable, "0"]


def test_a_sweep_finds_a_process_by_the_mark_among_its_arguments(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "digits-1" / "h1"
    clean = {name: value for name, value in os.environ.items() if name != "PSCTL_ORDERS"}
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()", f"PSCTL_ORDERS={job}/"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, env=clean) as child:
        assert child.pid in host_state.processes(str(job))
        child.communicate()
