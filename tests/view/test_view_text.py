"""Foreign text obeys nothing; curves and bars are what the numbers say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.view.text import clip, number, one_line, sanitize, sparkline, split, wrap


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hover the screen", "over the screen"),
        ("\x1b[?1049hother screen\x1b[>c", "other screen"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]0;a title\x1b\\text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x07clipboard", "clipboard"),
        ("\x1b]never ended", ""),
        ("\x1bP+q544e\x1b\\dcs", "dcs"),
        ("\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\after", "after"),
        ("\x1bcreset", "reset"),
        ("\x1b(0line drawing", "line drawing"),
        ("\x9b31mc1 csi", "c1 csi"),
        ("\x9d0;title\x9cc1 osc", "c1 osc"),
        ("\x90dcs\x9cafter", "after"),
        ("a\x85b\x84c\x88d", "abcd"),
        ("bell\x07back\x08space\x00nul\x7fdel", "bellbackspacenuldel"),
        ("a\tb", "a       b"),
        ("windows\r\nlines\r\n", "windows\nlines\n"),
        (" 10%|#  |\r 50%|## |\r100%|###|", "100%|###|"),
        (" 10%|#  |\r 50%|## |\r", " 50%|## |"),
        ("\u202egnp.exe\u2066", "gnp.exe"),
        ("line\u2028separator\ufeff", "lineseparator"),
        ("[rank0] [bold]stays[/bold] :smile:", "[rank0] [bold]stays[/bold] :smile:"),
        ("größe 3 µs 模型 🙂", "größe 3 µs 模型 🙂"),
        ("half a surrogate \ud800", "half a surrogate ?"),
        ("\x1b[", ""),
        ("\x1b", ""),
        ("\x1b\x1b[31m", ""),
    ],
)
def test_foreign_text_loses_what_a_terminal_would_obey(hostile, harmless):
    assert sanitize(hostile) == harmless


@given(st.text(alphabet=st.sampled_from("\x1b[]0;m\x07\\\r\n\t\x9b\x9d\x9cPX^_a?> \u202e")))
def test_whatever_comes_nothing_but_printable_text_and_newlines_is_left(text):
    left = sanitize(text)
    assert all(character == "\n" or character.isprintable() for character in left)
    assert sanitize(left) == left


@given(st.text())
def test_one_line_is_one_line(text):
    assert one_line(text) == " ".join(one_line(text).split())


def test_clip_and_wrap_show_that_something_is_left_out():
    assert (clip("abc", 3), clip("abcd", 3), clip("abc", 0)) == ("abc", "ab…", "…")
    assert wrap("one two three four", 9, 3) == ["one two", "three", "four"]
    assert wrap("one two three four", 9, 2) == ["one two", "three fo…"]
    assert wrap("", 9, 2) == [""]


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([5.0, 5.0, 5.0], 8, "▁▁▁"),
        ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([1, math.nan, math.inf, 2], 8, "▁█"),
        ([math.nan], 8, ""),
        ([1, 2], 0, ""),
        ([-1e308, 1e308], 2, "▁█"),
    ],
)
def test_a_curve_has_the_highest_block_at_the_highest_value(values, width, curve):
    assert sparkline(values, width) == curve


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(0, 60))
def test_a_curve_is_never_wider_than_asked(values, width):
    assert len(sparkline(values, width)) <= width


@pytest.mark.parametrize(
    ("width", "first", "second", "cells"),
    [
        (10, 3.0, 1.0, (8, 2)),
        (10, 1.0, 0.0, (10, 0)),
        (10, 0.0, 1.0, (0, 10)),
        (10, 0.0, 0.0, (0, 0)),
        (10, 1e-9, 1.0, (1, 9)),
        (10, 1.0, 1e-9, (9, 1)),
        (1, 1.0, 1.0, (0, 0)),
    ],
)
def test_a_bar_shares_its_cells_and_hides_nothing(width, first, second, cells):
    assert split(width, first, second) == cells


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (2.0, "2"),
        (1e-7, "1e-07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (None, "-"),
        (12345678.0, "1.235e+07"),
    ],
)
def test_a_metric_is_printed_with_four_digits(value, text):
    assert number(value) == text
