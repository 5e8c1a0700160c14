"""A pytest plugin that delays threads at random calls within psctl, which makes rare interleavings likely.

    python -m pytest -p tests.helpers.thread_delays tests/sync

A thread that calls a function of psctl, returns from one, or calls a C function there, sleeps once in `EVERY` times:
mostly so briefly that another thread gets the interpreter, now and then for up to 0.3 s, as on a busy machine. Only
threads of the tests' own process are delayed. A failure cannot be repeated exactly, for the system's schedule differs
as well: run the same test more often.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psctl

EVERY = 250
"""Calls of which one is delayed, on average."""

SLEEPS = ((0.5, 0.0), (0.9, 0.002), (0.99, 0.02), (1.0, 0.3))
"""Shares of delays, summed, and the seconds that each sleeps at most."""

ROOT = str(Path(psctl.__file__).parent) + "/"


class ThreadDelays:
    """Delays the threads that start while a test runs, and the test's own."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._sleep = time.sleep  # tests may replace it

    def pytest_runtest_setup(self) -> None:
        threading.setprofile(self._at_call)
        sys.setprofile(self._at_call)

    def pytest_runtest_teardown(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _at_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(ROOT) and self._random.random() * EVERY < 1:
            drawn = self._random.random()
            longest = next(seconds for share, seconds in SLEEPS if drawn <= share)
            self._sleep(longest * self._random.random())


def pytest_configure(config: Any) -> None:
    """Add the delays."""
    config.pluginmanager.register(ThreadDelays())
