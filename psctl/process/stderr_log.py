"""Standard error of the agent and the coordinator, which is a file on a disk that may be full: it never raises."""

from __future__ import annotations

import io
import os
import sys


class OwnLog(io.TextIOBase):
    """Writes text to a descriptor; what the disk does not take is counted, and told before what it takes next."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._missing = 0

    def write(self, text: str) -> int:
        """Write text, or count it as missing."""
        told = f"(the disk was full: {self._missing} bytes are missing here)\n" if self._missing else ""
        data = (told + text).encode("utf-8", "backslashreplace")
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
    """Have this process print so, whoever prints."""
    sys.stdout = sys.stderr = OwnLog(2)
