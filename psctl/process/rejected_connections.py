"""A word in a process's log when somebody was turned away at its port: the first at once, then a line a minute at most.

Only who spoke and was wrong is told of (no knock of this job's, another certificate, an older incarnation): that is
somebody at the door, or a sign that two jobs' addresses were mixed up. Who merely went away is not, for links break.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from psctl.errors import ConnectionFailed, PeerLost

PAUSE = 60.0
"""Seconds between two lines at least; however many come, a log grows by no more."""


class RejectionLog:
    """Told of callers that came to nothing, on any thread.

    Args:
        me: whose port it is, such as "server/0".
        say: takes a line.
        now: seconds, of a clock that never goes back.
    """

    def __init__(
        self, me: str, say: Callable[[str], None] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._me, self._say, self._now = me, say or _print, now
        self._lock = threading.Lock()
        self._count = 0  # since the last line
        self._said = now() - PAUSE

    def __call__(self, caller: str, error: ConnectionFailed) -> None:
        """Count a caller; say so if it is time."""
        if isinstance(error, PeerLost):
            return
        with self._lock:
            self._count += 1
            now = self._now()
            if now - self._said < PAUSE:
                return
            count, self._count, self._said = self._count, 0, now
        more = f" (and {count - 1} others since the last such line)" if count > 1 else ""
        self._say(f"psctl: {self._me} turned a caller away: {error.message}{more}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
