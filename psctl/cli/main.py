"""The entry point: installs the signal handlers, runs the command line, exits with its code."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from psctl.cli.shared.signals import Terminated


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main() -> None:
    """Run psctl with the process's arguments and exit with its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from psctl.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except Terminated:
        code = 143
    sys.exit(code)
