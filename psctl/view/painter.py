"""Paints rows at the bottom of a terminal, in place, and prints lines above them.

A painting writes only the rows that differ from those of the painting before, inside one synchronized update (private
mode 2026, which terminals without it ignore), so nothing flickers and a slow connection carries few bytes. Lines above
are inserted: the screen is scrolled by as many rows as they take, and the painted rows move down without being sent
again. Between two paintings the cursor is in the first column of the last row.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import termios
from collections.abc import Sequence
from typing import IO

from rich.cells import cell_len
from rich.text import Text

_BEGIN, _END = "\x1b[?2026h\x1b[?25l", "\x1b[?2026l"
_SHOW_CURSOR = "\x1b[?25h"
_ERASE_BELOW = "\x1b[J"
_ERASE_RIGHT = "\x1b[K"


class Painter:
    """Paints rows on a terminal.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._rows: list[str] = []
        self._size = (0, 0)

    def paint(self, rows: Sequence[str], above: Sequence[str], width: int, height: int) -> None:
        """Print lines and paint rows beneath them.

        Args:
            rows: with ANSI styles; each at most `width` cells, of which a style ends with its row.
            above: lines with ANSI styles, of any length; the terminal wraps them.
            width, height: of the terminal now, in cells.
        """
        rows = list(rows[:height])
        taken = sum(_rows_of(line, width) for line in above)
        if (width, height) == self._size and self._rows and taken + len(self._rows) <= height:
            text = self._insert(above, taken) + self._change(rows, width)
        else:
            text = self._erase(width) + "".join(line + "\r\n" for line in above) + "\r\n".join(rows) + "\r"
        self._rows, self._size = rows, (width, height)
        if text:
            self._write(_BEGIN + text + _END)

    def close(self, width: int) -> None:
        """Erase the rows and show the cursor, which is then where the first row was."""
        self._write(_BEGIN + self._erase(width) + _END + _SHOW_CURSOR)
        self._rows = []

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _erase(self, width: int) -> str:
        """Return what erases the rows, which a narrower terminal has wrapped meanwhile."""
        taken = sum(_rows_of(row, width) for row in self._rows)
        return "\r" + _move(1 - taken if taken else 0) + _ERASE_BELOW

    def _insert(self, above: Sequence[str], taken: int) -> str:
        """Return what inserts lines above the rows and leaves the cursor in the last row."""
        if not above:
            return ""
        last = len(self._rows) - 1
        scroll = "\n" * taken + _move(-(taken + last)) + f"\x1b[{taken}L"
        return scroll + "".join(line + "\r\n" for line in above) + _move(last)

    def _change(self, rows: list[str], width: int) -> str:
        """Return what turns the rows on the screen into other rows."""
        text, at = "", len(self._rows) - 1
        for index, (old, new) in enumerate(zip(self._rows, rows, strict=False)):
            if old != new:
                text += _move(index - at) + _row(new, width)
                at = index
        if len(rows) < len(self._rows):
            text += _move(len(rows) - at) + _ERASE_BELOW
            at = len(rows)
        elif len(rows) > len(self._rows):
            text += _move(len(self._rows) - 1 - at) + "".join("\r\n" + row for row in rows[len(self._rows) :]) + "\r"
            at = len(rows) - 1
        return text + _move(max(0, len(rows) - 1) - at)


def _row(row: str, width: int) -> str:
    """Return a row that replaces another one; erasing after a full row would erase its last character."""
    return row + (_ERASE_RIGHT if _cells(row) < width else "") + "\r"


def _move(rows: int) -> str:
    return f"\x1b[{-rows}A" if rows < 0 else f"\x1b[{rows}B" if rows else ""


def _cells(line: str) -> int:
    return Text.from_ansi(line).cell_len


def _rows_of(line: str, width: int) -> int:
    """Return the rows that a terminal needs for a line; a wide character is never divided between two rows."""
    plain = Text.from_ansi(line).plain
    if plain.isascii():
        return max(1, math.ceil(len(plain) / width))
    rows, column = 1, 0
    for character in plain:
        cells = cell_len(character)
        if column + cells > width:
            rows, column = rows + 1, 0
        column += cells
    return rows


class TypedKeys:
    """Stops the terminal from echoing typed keys while it is painted. Ctrl-C and Ctrl-Z work as ever.

    Keys stay in the terminal's queue for the next program. A process in the background leaves the terminal alone.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._found: int | None = None  # the flags before

    def hide(self) -> None:
        """Turn echo off, also again after another program has turned it on."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            descriptor = self._terminal()
            if descriptor is not None and os.tcgetpgrp(descriptor) == os.getpgrp():
                settings = termios.tcgetattr(descriptor)
                if settings[3] & termios.ECHO:
                    self._found = settings[3]
                    settings[3] &= ~termios.ECHO
                    termios.tcsetattr(descriptor, termios.TCSANOW, settings)

    def show(self) -> None:
        """Turn echo on if `hide` turned it off."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            descriptor = self._terminal()
            if self._found is not None and descriptor is not None and os.tcgetpgrp(descriptor) == os.getpgrp():
                settings = termios.tcgetattr(descriptor)
                settings[3] = self._found
                termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
        self._found = None

    def _terminal(self) -> int | None:
        descriptor = sys.stdin.fileno() if self._descriptor is None else self._descriptor
        return descriptor if os.isatty(descriptor) else None
