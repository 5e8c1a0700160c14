"""The live screen: a picture of the job that is redrawn in place; the output of ranks scrolls above it.

One thread draws a few times a second, so the thread that follows the job never waits for the terminal. Lines that
arrive between two drawings are printed together; of too many the newest are shown and the rest counted, for the log
files on the hosts have them all.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

from rich.console import Console, RenderableType
from rich.text import Text

from psctl.clock import Clock, SystemClock
from psctl.job import events as kinds
from psctl.view.console import Glyphs, rank_lines
from psctl.view.job_view import JobView
from psctl.view.live_picture import picture
from psctl.view.painter import Painter, TypedKeys
from psctl.view.plain_log import PlainLog

PERIOD = 0.25
"""Seconds between two drawings."""

BURST = 400
"""Lines shown at most between two drawings."""


def make_screen(console: Console, hint: str = "") -> LiveScreen | PlainLog:
    """Return a live screen for a terminal, else plain lines."""
    return LiveScreen(console, hint) if console.is_terminal else PlainLog(console, hint)


class LiveScreen:
    """Draws a job on a terminal while its context is open; then it erases the picture and keeps the lines above it.

    Args:
        console: of stderr, a terminal.
        hint: the line at the bottom: the effect of Ctrl-C.
        clock: for tests.
    """

    def __init__(self, console: Console, hint: str = "", clock: Clock | None = None) -> None:
        self.state = JobView()
        self._console = console
        self._hint = hint
        self._clock = clock or SystemClock()
        self._glyphs = Glyphs(console)
        self._lock = threading.Lock()
        self._lines: deque[Text] = deque(maxlen=BURST)
        self._dropped = 0
        self._latest = self._clock.now()
        self._ended = threading.Event()
        self._painter = Painter(console.file)
        self._keys = TypedKeys()
        self._thread = threading.Thread(target=self._run, name="psctl-live-screen", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.draw()
        self._painter.close(self._console.width)
        self._keys.show()

    def on_event(self, event: kinds.AnyEvent) -> None:
        """Apply an event to the picture, and queue the lines of a log event."""
        with self._lock:
            self.state.apply(event)
            self._latest = self._clock.now()
            if isinstance(event, kinds.Log):
                lines = rank_lines(event.rank, self.state.host_of(event.rank), event.text, self._glyphs)
                self._dropped += max(0, len(self._lines) + len(lines) - BURST)
                self._lines.extend(lines)

    def set_hint(self, text: str) -> None:
        """Replace the line at the bottom."""
        with self._lock:
            self._hint = text

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.draw()

    def draw(self) -> None:
        """Print the new lines and redraw the picture for the terminal's present size."""
        width, height = self._console.size
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
            age = self._clock.now() - self._latest
            drawing = picture(self.state, width, height, age, self._hint, self._glyphs)
        if dropped:
            lines.insert(0, Text(f"… {dropped:,} lines omitted here (psctl logs prints them)", style="dim"))
        rows = self._ansi(drawing, width)
        above = self._ansi(Text("\n").join(lines), None) if lines else []
        self._keys.hide()
        self._painter.paint(rows, above, width, height)

    def _ansi(self, drawing: RenderableType, width: int | None) -> list[str]:
        """Return a drawing's rows with their styles; without a width, lines of any length."""
        with self._console.capture() as captured:
            self._console.print(drawing, width=width, soft_wrap=width is None)
        return captured.get().removesuffix("\n").split("\n")
