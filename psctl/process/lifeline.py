"""How a process of a job is tied to the one that started it, so that neither outlives what it is for.

Two ties, both the kernel's, so that no thread is needed and a held interpreter lock does not matter:

- a death signal: when the thread that started this process ends, the process is killed (PR_SET_PDEATHSIG);
- a lifeline: a pipe whose other end the parent holds. At its end of file the kernel itself sends SIGKILL to this
  process's whole group (O_ASYNC with F_SETOWN and F_SETSIG), so that children of the process go with it.

The death signal is asked for by the child itself, after exec (which would clear nothing, but a fork in between would);
a parent that died before that is noticed by its process id.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal

ENVIRONMENT = "PSCTL_LIFELINE"
"""Holds "DESCRIPTOR:PARENT" for a child that is to arm itself; taken out of the environment when it does."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def hide_memory() -> None:
    """Keep keys in this process's memory out of core files and of the reach of other processes of the same user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def leave_no_core() -> None:
    """Have this process, and what it starts, write no core file unless it asks for one: keys would be in it."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def reap_descendants() -> None:
    """Make this process the one that orphans among its descendants fall to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask for signal `number` when the parent, whose process id is `parent`, dies; it may be dead already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def hold(descriptor: int) -> None:
    """Have the kernel kill this process's group when the pipe behind `descriptor` reaches its end of file."""
    os.set_inheritable(descriptor, False)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        closed = os.read(descriptor, 1) == b""  # the end of file may have come before O_ASYNC
    except BlockingIOError:
        closed = False
    if closed:
        os.killpg(0, signal.SIGKILL)


def arm() -> None:
    """Tie this process to the agent that started it; nothing happens when none did, or at a second call."""
    value = os.environ.pop(ENVIRONMENT, "")
    if value:
        leave_no_core()
        descriptor, parent = (int(part) for part in value.split(":"))
        die_with_parent(parent)
        hold(descriptor)
