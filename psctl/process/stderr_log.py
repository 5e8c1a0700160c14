"""Standard error of the agent and the coordinator, a file: writing to it raises no error when the disk is full."""

from __future__ import annotations

import io
import os
import sys


class OwnLog(io.TextIOBase):
    """Writes text to a descriptor; counts text that does not fit, and reports the count before the next text."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._missing = 0

    def write(self, text: str) -> int:
        """Write text, or count it as missing."""
        gap = f"(the disk was full: {self._missing} bytes are missing here)\n" if self._missing else ""
        data = (gap + text).encode("utf-8", "backslashreplace")
        try:
            os.write(self._descriptor, data)
            self._missing = 0
        except OSError:
            self._missing += len(text)
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor


def install() -> None:
    """Replace sys.stdout and sys.stderr of this process."""
    sys.stdout = sys.stderr = OwnLog(2)
