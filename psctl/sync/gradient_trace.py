"""Trace of the times at which gradients are computed and sent: JSON lines in the file that PSCTL_TRACE names."""

from __future__ import annotations

import json
import os
import threading

from psctl.clock import Clock, SystemClock

ENVIRONMENT = "PSCTL_TRACE"


class GradientTrace:
    """Collects events, and writes them once a step so that tracing does not disturb the measurement.

    Each line is {"time": seconds of a monotonic clock, "rank": 0, "event": name, ...}.
    """

    def __init__(self, path: str, clock: Clock | None = None, rank: int = 0) -> None:
        self._path, self._rank = path, rank
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._events: list[dict[str, object]] = []

    def __call__(self, event: str, **fields: object) -> None:
        """Record `event` with the present time; may be called by any thread."""
        with self._lock:
            self._events.append({"time": self._clock.now(), "rank": self._rank, "event": event, **fields})

    def flush(self) -> None:
        """Write the collected events."""
        with self._lock:
            events, self._events = self._events, []
        if events:
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)


def from_environment(rank: int) -> GradientTrace | None:
    """Return the trace that PSCTL_TRACE requests ("{rank}" in it becomes this rank), or None."""
    path = os.environ.get(ENVIRONMENT)
    return GradientTrace(path.replace("{rank}", str(rank)), rank=rank) if path else None
