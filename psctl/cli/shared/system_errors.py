"""Errors of the user's own machine (no permission, a full disk, too few descriptors) as errors with a cure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from psctl.errors import DiskFull, PsctlError, UsageError

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_NO_THREAD, _NO_FORK = "can't start new thread", f"[Errno {errno.EAGAIN:d}] {os.strerror(errno.EAGAIN)}"


def of_system(error: OSError | RuntimeError, home: Path) -> PsctlError | None:
    """Return what a user can do about an error of this machine; None for any other, which is a defect of psctl.

    Args:
        error: what the system refused.
        home: the folder that PSCTL_HOME names.
    """
    if isinstance(error, RuntimeError) or error.errno == errno.EAGAIN:
        return _no_process(str(error))
    path, problem = str(error.filename or ""), error.strerror or str(error)
    in_home = Path(path).is_relative_to(home) or home.is_relative_to(path) if path else False
    elsewhere = ", or set PSCTL_HOME to another folder" if in_home else ""
    if error.errno == errno.ENOENT and not _has_current_folder():
        return UsageError("the current folder does not exist any more", hint="cd to another one")
    if error.errno in _DENIED and path:
        hint = f"check its owner and permissions (you are {_user()}){elsewhere}"
        return UsageError(f"{path}: {problem[:1].lower()}{problem[1:]}", hint=hint, where=path)
    if error.errno in _FULL:
        file = path or "a file"
        return DiskFull(
            f"{file} could not be written: {problem}", hint=f"free space on its disk{elsewhere}", where=path
        )
    if error.errno in _TOO_MANY:
        return UsageError(f"psctl needs more descriptors: {problem}", hint="raise the limit: ulimit -n 4096")
    return None


def _no_process(text: str) -> PsctlError | None:
    if text not in (_NO_THREAD, _NO_FORK):
        return None
    return UsageError(
        "this machine allows you no more processes and threads",
        hint="end others (ps -L -u $USER lists them), or raise the limit (ulimit -u; pids.max of a container)",
    )


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _user() -> str:
    return os.environ.get("USER") or f"user {os.geteuid()}"
