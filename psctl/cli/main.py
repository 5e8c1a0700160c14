"""The entry point: installs the signal handlers, opens closed streams, runs the command line, exits with its code."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from psctl.cli.shared.signals import Terminated


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the caller closed: files and sockets would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> None:
    """Run psctl with the process's arguments and exit with its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    _open_closed_streams()
    try:
        from psctl.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except Terminated:
        code = 143
    sys.exit(code)
