"""The painter, on a terminal emulator: after any paintings the screen shows the lines above and the last rows."""

from __future__ import annotations

import io
import os
import pty
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.view.painter import Painter, TypedKeys
from tests.helpers.emulated_terminal import EmulatedTerminal

WIDTH, HEIGHT = 12, 8

ROWS = st.lists(st.sampled_from(["", "a", "row", "x" * WIDTH, "\x1b[1mbold\x1b[0m", "日本" * 3]), max_size=HEIGHT)
LINES = st.lists(st.sampled_from(["log", "y" * WIDTH, "z" * (2 * WIDTH + 1), "日本語" * 3, "\x1b[36mrank\x1b[0m", ""]),
                 max_size=10)  # fmt: skip


def wrapped(line):
    line = line.replace("\x1b[1m", "").replace("\x1b[36m", "").replace("\x1b[0m", "")
    rows, row, cells = [], "", 0
    for character in line:
        size = 1 if character.isascii() else 2
        if cells + size > WIDTH:
            rows.append(row)
            row, cells = "", 0
        row, cells = row + character, cells + size
    return [*rows, row]


@given(st.lists(st.tuples(ROWS, LINES), min_size=1, max_size=8))
def test_the_screen_shows_every_line_above_and_the_last_rows(paintings):
    terminal = EmulatedTerminal(WIDTH, HEIGHT)
    painter = Painter(terminal)
    expected = []
    for rows, above in paintings:
        painter.paint(rows, above, WIDTH, HEIGHT)
        expected += [row for line in above for row in wrapped(line)]
        shown = expected + [wrapped(row)[0] for row in rows]
        while shown and not shown[-1]:
            shown.pop()
        assert terminal.lines() == shown
        assert terminal.screen.cursor.x == 0
    painter.close(WIDTH)
    while expected and not expected[-1]:
        expected.pop()
    assert terminal.lines() == expected
    assert not terminal.screen.cursor.hidden


def test_only_changed_rows_are_written():
    stream = io.StringIO()
    painter = Painter(stream)
    painter.paint(["first", "second", "third"], [], 40, 20)
    before = stream.tell()
    painter.paint(["first", "second", "third"], [], 40, 20)
    assert stream.tell() == before
    painter.paint(["first", "2nd", "third"], [], 40, 20)
    written = stream.getvalue()[before:]
    assert "2nd" in written and "first" not in written and "third" not in written
    assert written.startswith("\x1b[?2026h") and written.endswith("\x1b[?2026l")
    before = stream.tell()
    painter.paint(["first", "2nd", "third"], ["a log line"], 40, 20)
    assert "a log line" in stream.getvalue()[before:] and "first" not in stream.getvalue()[before:]


def test_another_size_paints_all_rows_again():
    stream = io.StringIO()
    painter = Painter(stream)
    painter.paint(["first", "second"], [], 40, 20)
    before = stream.tell()
    painter.paint(["first", "second"], [], 6, 20)
    written = stream.getvalue()[before:]
    assert "first" in written and "second" in written and "\x1b[1A" in written


@pytest.fixture
def terminal_pair():
    outer, inner = pty.openpty()
    yield inner
    os.close(outer)
    os.close(inner)


def test_a_terminal_of_another_session_keeps_its_echo(terminal_pair):
    keys = TypedKeys(terminal_pair)
    keys.hide()
    assert termios.tcgetattr(terminal_pair)[3] & termios.ECHO
    keys.show()


def test_keys_are_not_echoed_while_hidden():
    child, outer = pty.fork()
    if child == 0:  # pragma: no cover
        code = 9
        try:
            keys = TypedKeys(0)
            keys.hide()
            off = not termios.tcgetattr(0)[3] & termios.ECHO
            keys.show()
            code = 0 if off and termios.tcgetattr(0)[3] & termios.ECHO else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    os.close(outer)
    assert os.waitstatus_to_exitcode(status) == 0


def test_no_terminal_is_no_error(tmp_path):
    with open(tmp_path / "file", "w") as file:
        keys = TypedKeys(file.fileno())
        keys.hide()
        keys.show()
