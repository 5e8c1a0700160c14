"""Keeps a process alive when it gets SIGTERM from another than its agent, and lets the agent end it at once.

Slurm and systemd send SIGTERM to every process of a job some time before they kill them. The agent then has the job
write a checkpoint and stop, for which its processes must live on. So SIGTERM alone does nothing here. The agent ends a
process by SIGTERM and NUMBER: a thread waits for NUMBER, and gives SIGTERM its default action back. That ends the
process even while its main thread is inside a library. A script that handles SIGTERM itself is left to do so.

Processes that this one starts end by SIGTERM as always. Only the standard library is imported here, because
bootstrap.py arms every process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import FrameType

NUMBER = int(signal.SIGRTMIN) + 12
"""The signal that confirms a SIGTERM."""


def arm() -> None:
    """Ignore SIGTERM from now on unless NUMBER follows; called on the main thread, before others start."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    handler = _Ignored(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, {NUMBER})
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(
        before=handler.before_fork, after_in_parent=handler.after_fork, after_in_child=handler.after_fork_in_child
    )
    threading.Thread(target=handler.await_end, name="psctl end", daemon=True).start()


def armed(pid: int) -> bool:
    """Return whether a process waits for the signal; one that does not would be ended by it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            blocked = next((line.split()[1] for line in file if line.startswith("SigBlk:")), "0")
    except OSError:
        return False
    return bool(int(blocked, 16) >> (NUMBER - 1) & 1)


class _Ignored:
    """The handler of SIGTERM in the process that is armed; `process` is its id."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._ignored = False  # a SIGTERM that NUMBER has not confirmed yet
        self._forking = threading.local()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that C code forked, which ran none of the functions below
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._ignored = True

    def before_fork(self) -> None:
        """Block SIGTERM until the child has its default action: Python forgets signals that a new child gets."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork(self) -> None:
        """Unblock SIGTERM in the parent unless it was blocked before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_fork_in_child(self) -> None:
        """Give SIGTERM its default action back, unless another handler was set; one that has arrived acts then."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after_fork()

    def await_end(self) -> None:
        """End the process when NUMBER arrives, unless the script has a handler of its own.

        A script may set its handler, or the default one, between SIGTERM and NUMBER; it then gets the SIGTERM again.
        """
        libc = ctypes.CDLL(None)
        while True:
            signal.sigwait({NUMBER})
            if signal.getsignal(signal.SIGTERM) is self:
                libc.signal(int(signal.SIGTERM), None)  # None is SIG_DFL; Python's own works on the main thread only
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._ignored:
                self._ignored = False
                os.kill(os.getpid(), signal.SIGTERM)
