"""Ties a process of a job to the process that started it, so that it ends with its parent.

Two mechanisms of the kernel, which need no thread and work while a library holds the interpreter lock:

- a death signal: when the thread that started this process ends, the process is killed (PR_SET_PDEATHSIG);
- a lifeline: a pipe whose other end the parent holds. At its end of file the kernel sends SIGKILL to this process's
  whole group (O_ASYNC with F_SETOWN and F_SETSIG), so that children of the process end too.

The child requests the death signal itself, after exec (which would keep it, but a fork in between would clear it); it
detects a parent that ended earlier by its parent's process id.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal

ENVIRONMENT = "PSCTL_LIFELINE"
"""Environment variable of a child with "DESCRIPTOR:PARENT"; `arm` removes it."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def hide_memory(mounts: str = "/proc/self/mounts") -> None:
    """Keep this process's memory, which has keys, out of core files and unreadable for the user's other processes.

    Where /proc shows a user only the processes that it may trace, a process that hides its memory is invisible for its
    own user too, and psctl would take it for ended: there it keeps its memory out of core files only.

    Args:
        mounts: the file with this process's mounts.
    """
    if _shows_traceable_only(mounts):
        leave_no_core()
    else:
        _prctl(_PR_SET_DUMPABLE, 0)


def _shows_traceable_only(mounts: str) -> bool:
    """Return whether /proc is mounted with hidepid."""
    found = ""
    with open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, point, kind, options, *_ = line.split()
            if (point, kind) == ("/proc", "proc"):
                found = next((each for each in options.split(",") if each.startswith("hidepid=")), "")
    return found not in ("", "hidepid=0", "hidepid=off")


def leave_no_core() -> None:
    """Set the soft limit of core files to 0 for this process and its children: keys would be in the files."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def reap_descendants() -> None:
    """Make this process the subreaper, which inherits orphans among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Request signal `number` for the end of the parent, whose process id is `parent`; it may have ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def hold(descriptor: int) -> None:
    """Have the kernel kill this process's group when the pipe `descriptor` reaches its end of file."""
    os.set_inheritable(descriptor, False)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        closed = os.read(descriptor, 1) == b""  # the end of file may be older than O_ASYNC
    except BlockingIOError:
        closed = False
    if closed:
        os.killpg(0, signal.SIGKILL)


def arm() -> None:
    """Tie this process to the agent that started it; does nothing without an agent, or at a second call."""
    value = os.environ.pop(ENVIRONMENT, "")
    if value:
        leave_no_core()
        descriptor, parent = (int(part) for part in value.split(":"))
        die_with_parent(parent)
        hold(descriptor)
