"""`psctl stacks` on a job that hangs: the line in which a worker waits, and the reason why another one is silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import os, signal, threading

def hold(lock):
    lock.acquire()

lock = threading.Lock()
lock.acquire()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
hold(lock)
"""


def psctl(home: Path, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PSCTL_", "FORCE_"))}
    run = subprocess.run(
        [sys.executable, "-m", "psctl", *arguments],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=home, timeout=100,
        env={**clean, "PYTHONPATH": str(ROOT), "HOME": str(home), "PSCTL_HOME": str(home / "state")},
    )  # fmt: skip
    assert code is None or run.returncode == code, f"exit {run.returncode}\n{run.stdout}\n{run.stderr}"
    return run


def test_a_hang_is_seen_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text("version: 1\nname: hang\nscript: hang.py\nworkers: 2\n")
    psctl(tmp_path, "train", "job.yaml", "-d")
    try:
        deadline = time.monotonic() + 60
        while True:
            found = json.loads(psctl(tmp_path, "stacks", "hang", "-o", "json").stdout)["processes"]
            by_rank = {each["rank"]: each for each in found}
            if len(by_rank) == 2 and by_rank["worker/0"]["main"] and "SIGSTOP" in by_rank["worker/1"]["problem"]:
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        assert by_rank["worker/0"]["main"][-1] == "hang.py:5 in hold: lock.acquire()"
        assert by_rank["worker/1"]["main"] == []
        began = time.monotonic()
        text = psctl(tmp_path, "stacks", "hang").stdout
        assert time.monotonic() - began < 20
        assert "worker/0 on local\n" in text and "  hang.py:5 in hold: lock.acquire()\n" in text
        only = json.loads(psctl(tmp_path, "stacks", "hang", "-r", "worker:0", "-o", "json").stdout)["processes"]
        assert [each["rank"] for each in only] == ["worker/0"]
        assert "worker/7" in psctl(tmp_path, "stacks", "hang", "-r", "worker:7", code=2).stderr
    finally:
        psctl(tmp_path, "stop", "hang", "--force", code=None)
    assert "has ended" in psctl(tmp_path, "stacks", "hang", code=6).stderr
