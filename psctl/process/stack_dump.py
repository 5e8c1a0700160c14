"""Writes the Python stacks of a process's threads when its agent sends it a signal.

The signal's handler is faulthandler's, in C: it also works while a library holds the interpreter lock. It writes to
memory that the agent reads, so it works on a full disk and never blocks. Only the standard library is imported here,
because bootstrap.py arms every process.
"""

from __future__ import annotations

import faulthandler
import os
import signal

NUMBER = int(signal.SIGRTMIN) + 11
"""The signal: a real-time signal, because scripts and schedulers use SIGUSR1 and SIGUSR2."""


def arm(descriptor: int) -> None:
    """Write stacks to `descriptor` at the signal; children of the process do not inherit the descriptor."""
    os.set_inheritable(descriptor, False)
    faulthandler.register(NUMBER, file=descriptor, all_threads=True, chain=False)


def armed(pid: int) -> bool:
    """Return whether a process handles the signal; a process that does not would be ended by it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (NUMBER - 1) & 1)
