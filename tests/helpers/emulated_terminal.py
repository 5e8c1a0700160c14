"""A terminal in memory, which keeps what a person would see on it and in its scrollback."""

from __future__ import annotations

import io

import pyte


class EmulatedTerminal(io.StringIO):
    """A stream that says it is a terminal; `getvalue` returns all that was sent to it."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(width, height, history=100_000)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        return super().write(text)

    def lines(self) -> list[str]:
        """Return all lines since the beginning, without the empty ones at the end."""
        gone = ["".join(row[column].data for column in range(self.screen.columns)) for row in self.screen.history.top]
        lines = [line.rstrip() for line in [*gone, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines
