"""One line on a terminal for what lasts: a bar for files on their way to or from hosts, or the time of work there.

The line is gone when the files have arrived and the work is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

LASTING = 2.0
"""Seconds after which work that goes on is shown."""

TICK = 1.0
"""Seconds between two drawings of work."""


@dataclass(frozen=True, eq=False)
class _LastingWork:
    """Work that goes on, since `began`; `seconds` as foretold, 0: not known."""

    host: str
    what: str
    seconds: float
    began: float


class TransferBar:
    """Counts the bytes of all transfers that run, on any thread, and shows work between them.

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
        self._works: list[_LastingWork] = []
        self._ended_work = threading.Event()

    @contextmanager
    def work(self, host: str, what: str, seconds: float = 0.0) -> Iterator[None]:
        """Show work on a host ("": on all) that lasts, until the context ends.

        Args:
            host: its name.
            what: the work.
            seconds: how long it takes, as foretold; 0: that is not known.
        """
        own = _LastingWork(host, what, seconds, self._now())
        with self._lock:
            self._works.append(own)
            if len(self._works) == 1 and self._console.is_terminal:
                self._ended_work = threading.Event()
                threading.Thread(
                    target=self._tick, args=(self._ended_work,), name="psctl work in progress", daemon=True
                ).start()
        try:
            yield
        finally:
            with self._lock:
                self._works.remove(own)
                if not self._works:
                    self._ended_work.set()
                if not self._hosts:
                    self._erase()

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(TICK):
            self.draw_work()

    def draw_work(self) -> None:
        """Draw the work that has lasted for a while, unless files of some size are on their way.

        A command's input counts as a transfer until the command ends, also when all of it has been read.
        """
        with self._lock:
            now = self._now()
            moving = bool(self._hosts) and self._total >= LEAST and self._moved < self._total
            if self._works and not moving and now - self._works[0].began >= LASTING:
                self._draw(self._work_text(now))

    def _work_text(self, now: float) -> str:
        first = self._works[0]
        same = [each for each in self._works if each.what == first.what]
        where = first.host if len(same) == 1 else f"{len(same)} hosts"
        lasts = format_seconds(float(int(now - first.began)))
        text = f"{where}: {first.what}" if where else first.what
        if len(same) < len(self._works):
            text += f" (and {len(self._works) - len(same)} more)"
        if not first.seconds:  # a long text is cut, not its time
            return f"  {clip(text, max(1, self._console.width - 5 - len(lasts)))}, {lasts}"
        full, light = split(WIDTH, min(now - first.began, first.seconds), max(0.0, first.seconds - now + first.began))
        bar = self._glyphs.full * full + self._glyphs.light * light
        return f"  {bar}  {text}, {lasts} of about {format_seconds(first.seconds)}"

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
                self._drawn_at = now
                self._draw(self._text(now))

    def _draw(self, text: str) -> None:
        self._drawn = True
        self._console.file.write("\r\x1b[2K" + clip(text, self._console.width - 1))
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
