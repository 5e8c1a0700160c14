"""A bar for files on their way to or from hosts: one line on a terminal, which is gone when they have arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from psctl.units import format_bytes, format_rate, format_seconds
from psctl.view.console import Glyphs
from psctl.view.text import clip, split

LEAST = 4_000_000
"""Bytes from which on a bar is drawn; less has arrived before one can read it."""

PACE = 0.1
"""Seconds between two drawings."""

GAP = 1.0
"""Seconds between two transfers up to which they are one: the files of a folder."""

WIDTH = 30


class TransferBar:
    """Counts the bytes of all transfers that run, on any thread.

    Args:
        console: of stderr; on one that is no terminal nothing is drawn.
        now: seconds of a monotonic clock.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._glyphs = Glyphs(console)
        self._lock = threading.Lock()
        self._hosts: dict[str, int] = {}  # transfers that run, by host
        self._moved = self._total = 0
        self._began = self._ended = self._drawn_at = 0.0
        self._drawn = False

    @contextmanager
    def transfer(self, host: str, size: int) -> Iterator[Callable[[int], None]]:
        """Count one file of `size` bytes; yields what is called with each number of bytes that has been moved."""
        with self._lock:
            now = self._now()
            if not self._hosts and now - self._ended > GAP:
                self._began, self._moved, self._total = now, 0, 0
            self._total += size
            self._hosts[host] = self._hosts.get(host, 0) + 1
        try:
            yield self._add
        finally:
            with self._lock:
                self._hosts[host] -= 1
                if not self._hosts[host]:
                    del self._hosts[host]
                if not self._hosts:
                    self._ended = self._now()
                    self._erase()

    def erase(self) -> None:
        """Erase the bar, because a line is to be printed in its place; it comes back."""
        with self._lock:
            self._erase()

    def _add(self, count: int) -> None:
        with self._lock:
            self._moved += count
            now = self._now()
            due = now - self._drawn_at >= PACE
            if self._console.is_terminal and self._total >= LEAST and (due or self._moved >= self._total):
                self._drawn_at, self._drawn = now, True
                self._console.file.write("\r\x1b[2K" + clip(self._text(now), self._console.width - 1))
                self._console.file.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._console.file.write("\r\x1b[2K")
            self._console.file.flush()

    def _text(self, now: float) -> str:
        full, light = split(WIDTH, self._moved, max(0, self._total - self._moved))
        parts = [
            f"  {self._glyphs.full * full}{self._glyphs.light * light}",
            f"{format_bytes(self._moved)} of {format_bytes(self._total)}",
        ]
        if now > self._began and self._moved:
            rate = self._moved / (now - self._began)
            parts += [format_rate(rate), f"{format_seconds(max(0, self._total - self._moved) / rate)} left"]
        if len(self._hosts) > 1:
            parts.append(f"{len(self._hosts)} hosts")
        return "  ".join(parts)
