"""The bar of transfers: what it shows, when it is drawn, and that nothing of it stays."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from psctl.view.transfer_bar import LASTING, WIDTH, TransferBar


class Screen:
    def __init__(self, *, terminal: bool = True, width: int = 100) -> None:
        self.file, self.time = io.StringIO(), 100.0
        console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None)
        self.bar = TransferBar(console, lambda: self.time)

    def shown(self) -> str:
        """What stands on the line now."""
        return self.file.getvalue().rpartition("\x1b[2K")[2]


def test_the_bar_has_bytes_rate_and_time_left_and_goes_away() -> None:
    screen = Screen()
    with screen.bar.transfer("a", 60_000_000) as one, screen.bar.transfer("b", 40_000_000) as other:
        screen.time += 1
        one(25_000_000)
        assert screen.shown().split("  ")[2:] == ["25 MB of 100 MB", "25 MB/s", "3 s left", "2 hosts"]
        screen.time += 0.05
        other(1_000_000)
        assert "25 MB of" in screen.shown(), "it is not drawn more often than can be seen"
        screen.bar.erase()
        assert screen.shown() == ""
        screen.time += 1
        other(1)
        assert "26 MB of 100 MB" in screen.shown()
    assert screen.shown() == ""
    assert "\n" not in screen.file.getvalue()


def test_files_that_follow_each_other_are_one_transfer() -> None:
    screen = Screen()
    for _ in range(2):
        with screen.bar.transfer("a", 10_000_000) as count:
            screen.time += 1
            count(10_000_000)
    assert "20 MB of 20 MB" in screen.file.getvalue()
    screen.time += 10
    with screen.bar.transfer("a", 10_000_000) as count:
        screen.time += 1
        count(5_000_000)
        assert "5 MB of 10 MB" in screen.shown()


def test_a_transfer_that_fails_leaves_no_bar() -> None:
    screen = Screen()

    def fail() -> None:
        with screen.bar.transfer("a", 10_000_000) as count:
            screen.time += 1
            count(1)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert screen.shown() == ""


@pytest.mark.parametrize(("terminal", "size"), [(False, 10**9), (True, 100_000)])
def test_nothing_is_drawn_in_a_pipe_or_for_small_files(terminal: bool, size: int) -> None:
    screen = Screen(terminal=terminal)
    with screen.bar.transfer("a", size) as count:
        screen.time += 1
        count(size)
    assert screen.file.getvalue() == ""


def test_a_narrow_terminal_has_a_shorter_line() -> None:
    screen = Screen(width=40)
    with screen.bar.transfer("a", 10**9) as count:
        screen.time += 1
        count(5)
        assert len(screen.shown()) == 39


def test_work_that_lasts_is_shown_with_its_time_and_goes_away() -> None:
    screen = Screen()
    with screen.bar.work("a", "install torch==2.13.0"):
        screen.time += LASTING / 2
        screen.bar.draw_work()
        assert screen.shown() == "", "it may be over before one can read it"
        screen.time += 44
        screen.bar.draw_work()
        assert screen.shown() == "  a: install torch==2.13.0, 45 s"
        with screen.bar.work("b", "install torch==2.13.0"), screen.bar.work("c", "write ready.json"):
            screen.bar.draw_work()
            assert screen.shown() == "  2 hosts: install torch==2.13.0 (and 1 more), 45 s"
            with screen.bar.transfer("c", 60_000_000) as moved:
                screen.time += 1
                moved(25_000_000)
                assert "25 MB of 60 MB" in screen.shown()
                screen.bar.draw_work()
                assert "25 MB of 60 MB" in screen.shown(), "the bar of files goes first"
    assert screen.shown() == ""
    screen.bar.draw_work()
    assert screen.shown() == ""


def test_work_is_shown_while_a_command_runs_that_has_read_its_input() -> None:
    screen = Screen()
    with screen.bar.work("a", "install torch==2.13.0"), screen.bar.transfer("a", 5_000) as moved:
        moved(5_000)
        screen.time += 30
        screen.bar.draw_work()
        assert screen.shown() == "  a: install torch==2.13.0, 30 s"


def test_a_long_text_is_cut_and_not_its_time() -> None:
    screen = Screen()
    with screen.bar.work("a", "install " + "x" * 200):
        screen.time += 90
        screen.bar.draw_work()
        assert screen.shown().endswith("x…, 1m30s")
        assert len(screen.shown()) < 100


def test_work_whose_time_is_foretold_is_a_bar() -> None:
    screen = Screen()
    with screen.bar.work("", "measuring", 20.0):
        screen.time += 10
        screen.bar.draw_work()
        bar, text = screen.shown().strip().split("  ")
        assert bar == "█" * (WIDTH // 2) + "░" * (WIDTH // 2)
        assert text == "measuring, 10 s of about 20 s"
        screen.time += 100
        screen.bar.draw_work()
        assert "110 s" in screen.shown() or "1m50s" in screen.shown()
