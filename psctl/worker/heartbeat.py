"""Tells the coordinator every second that this worker lives and what it is at, and sends its reports."""

from __future__ import annotations

import threading
from collections.abc import Callable

from psctl.clock import Clock

BEAT_SECONDS = 1.0


class HeartbeatThread:
    """A background thread that beats until it is ended.

    Args:
        beat: called every second.
        report: called every `report_seconds`.
    """

    def __init__(
        self, beat: Callable[[], None], report: Callable[[], None], report_seconds: float, clock: Clock
    ) -> None:
        self._beat, self._report, self._every, self._clock = beat, report, report_seconds, clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psctl-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop beating; returns when the thread has ended."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        reported = self._clock.now()
        tick = min(BEAT_SECONDS, self._every)
        beaten = self._clock.now() - BEAT_SECONDS
        while not self._over.is_set():
            now = self._clock.now()
            if now - beaten >= BEAT_SECONDS:
                beaten = now
                self._beat()
            if now - reported >= self._every:
                reported = now
                self._report()
            self._over.wait(tick)
