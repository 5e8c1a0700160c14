"""What the user's machine refuses is told with a cure; an error of no known cause is a defect of psctl."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psctl.cli.shared.system_errors import of_system
from psctl.errors import PsctlError
from tests.helpers.running import ROOT, Psctl

HOME = Path("/home/ann/.psctl")


def found(number: int, path: str | None) -> PsctlError | None:
    return of_system(OSError(number, os.strerror(number), path), HOME)


@pytest.mark.parametrize(
    ("number", "path", "exit_code", "message", "hint"),
    [
        (errno.EACCES, "/home/ann/.psctl/jobs", 2, "/home/ann/.psctl/jobs: permission denied", "or set PSCTL_HOME"),
        (errno.EROFS, "/home/ann", 2, "/home/ann: read-only file system", "or set PSCTL_HOME"),
        (errno.EACCES, "/data/train.bin", 2, "/data/train.bin: permission denied", "check its owner and permissions"),
        (errno.ENOSPC, "/home/ann/.psctl/jobs/a", 4, "a could not be written: No space", "free space on its disk, or"),
        (errno.EDQUOT, None, 4, "a file could not be written: Disk quota exceeded", "free space on its disk"),
        (errno.EMFILE, None, 2, "psctl needs more descriptors: Too many open files", "ulimit -n"),
        (errno.EAGAIN, None, 2, "this machine allows you no more processes and threads", "ulimit -u"),
    ],
)
def test_an_error_of_the_system_has_a_cure(
    number: int, path: str | None, exit_code: int, message: str, hint: str
) -> None:
    error = found(number, path)
    assert error is not None
    assert error.exit == exit_code
    assert message in error.message
    assert hint in error.hint
    assert ("PSCTL_HOME" in error.hint) == (path is not None and path.startswith("/home/ann"))


@pytest.mark.parametrize(
    ("number", "path"), [(errno.EPERM, None), (errno.ENOENT, None), (errno.EINVAL, "/home/ann"), (errno.EIO, "/x")]
)
def test_others_are_defects(number: int, path: str | None) -> None:
    assert found(number, path) is None


def test_a_thread_that_cannot_start_is_no_defect() -> None:
    error = of_system(RuntimeError("can't start new thread"), HOME)
    assert error is not None
    assert "ulimit -u" in error.hint
    assert of_system(RuntimeError("dictionary changed size during iteration"), HOME) is None
    assert of_system(BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0), HOME) is None


@pytest.mark.whole
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_defect(tmp_path: Path, closed: str) -> None:
    environment = {**os.environ, "PSCTL_HOME": str(tmp_path / "home")}
    command = f'"{sys.executable}" -m psctl status {closed}'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done
    assert ("no jobs" in done.stdout) == (">&-" not in closed.replace("2>&-", "")), done


@pytest.mark.whole
def test_a_current_folder_that_was_removed_is_said(tmp_path: Path) -> None:
    environment = {**os.environ, "PSCTL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = f'mkdir gone; cd gone; rmdir ../gone; "{sys.executable}" -m psctl status'
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the current folder does not exist any more" in done.stderr


@pytest.mark.whole
def test_a_home_that_cannot_be_made_is_said_with_its_cure(tmp_path: Path) -> None:
    job = str(ROOT / "templates/digits/job.yaml")
    ended = Psctl(tmp_path, environment={**os.environ, "PSCTL_HOME": "/sys/psctl"}).run("train", job, "-o", "json")
    assert ended.code == 2, ended
    assert ended.document["error"]["code"] == "usage"
    assert ended.document["error"]["message"].startswith("/sys/psctl: ")
    assert "or set PSCTL_HOME to another folder" in ended.document["error"]["hint"]
