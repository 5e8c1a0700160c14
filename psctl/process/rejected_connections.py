"""Log lines about rejected connections to a port: the first at once, then one line a minute at most.

Only connections that sent something wrong are logged (a wrong proof of the job's secret, another certificate, an older
incarnation): they are a sign of an intruder, or of mixed-up addresses of two jobs. Connections that only broke are not
logged.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from psctl.errors import ConnectionFailed, PeerLost

PAUSE = 60.0
"""Seconds between two lines, at least, so that many connections do not fill the log."""


class RejectionLog:
    """Counts rejected connections and logs them. May be called by any thread.

    Args:
        me: the owner of the port, such as "server/0".
        write: takes a line; None: standard error.
        now: seconds, of a clock that never goes back.
    """

    def __init__(
        self, me: str, write: Callable[[str], None] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._me = me
        self._write = write or _print
        self._now = now
        self._lock = threading.Lock()
        self._count = 0  # since the last line
        self._last_line = now() - PAUSE

    def __call__(self, caller: str, error: ConnectionFailed) -> None:
        """Count a rejected connection; log it if the last line is a minute old."""
        if isinstance(error, PeerLost):
            return
        with self._lock:
            self._count += 1
            now = self._now()
            if now - self._last_line < PAUSE:
                return
            count, self._count, self._last_line = self._count, 0, now
        more = f" (and {count - 1} others since the last such line)" if count > 1 else ""
        self._write(f"psctl: {self._me} rejected a connection: {error.message}{more}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
