"""Consoles for stdout and stderr: colours and tables at a terminal, plain lines elsewhere.

A console that is no terminal truncates and wraps nothing, because files, grep and other programs read it. Markup and
emoji codes are off: `[rank0]` in a user's log stays `[rank0]`. --no-color, NO_COLOR, PSCTL_NO_COLOR and TERM=dumb turn
colour off; FORCE_COLOR and CI variables do not turn it on in a pipe.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import IO

from rich.console import Console as Console
from rich.text import Text

from psctl.view.text import BLOCKS, PLAIN_BLOCKS, one_line, sanitize


def make_console(stream: IO[str], *, no_color: bool = False, environment: Mapping[str, str] | None = None) -> Console:
    """Return the console of a stream.

    Args:
        stream: sys.stdout or sys.stderr. Characters that its encoding does not have become `?`.
        no_color: --no-color was given.
        environment: in place of the process's, for tests.
    """
    found = os.environ if environment is None else environment
    dumb = found.get("TERM", "").lower() in ("dumb", "unknown")
    terminal = stream.isatty() and not dumb
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    plain = no_color or bool(found.get("NO_COLOR")) or bool(found.get("PSCTL_NO_COLOR"))
    return Console(
        file=stream,
        force_terminal=terminal,
        force_interactive=terminal,
        color_system="auto" if terminal and not plain else None,
        no_color=plain,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not terminal,
    )


def say(console: Console, *lines: str | Text, style: str = "") -> None:
    """Print lines without truncating or wrapping them; a pipe gets them unchanged, with tabs."""
    for line in lines:
        text = Text(line, style=style) if isinstance(line, str) else line
        if console.is_terminal:
            console.print(text, soft_wrap=True)
        else:
            console.file.write(text.plain + "\n")
    console.file.flush()


class Glyphs:
    """The characters that a console's encoding can show."""

    def __init__(self, console: Console) -> None:
        fancy = console.encoding.lower().startswith("utf")
        self.braille = fancy
        self.blocks = BLOCKS if fancy else PLAIN_BLOCKS
        self.done, self.failed, self.stopped = ("✓", "✗", "■") if fancy else ("+", "x", "-")
        self.bar, self.line, self.dot = ("│", "─", "·") if fancy else ("|", "-", "-")
        self.full, self.light = ("█", "░") if fancy else ("#", ".")
        self.parts = "█░▒▓▚" if fancy else "#.o+@"  # of psctl.job.activity.PARTS
        self.tee, self.corner, self.stem = ("├─ ", "└─ ", "│  ") if fancy else ("|- ", "`- ", "|  ")
        self.arrow, self.warning, self.cure = ("→", "▲", "→") if fancy else (">", "!", "->")
        self.cable = "──" if fancy else "--"


ROLE_STYLES: Mapping[str, str] = {
    "worker": "cyan",
    "server": "magenta",
    "reader": "green",
    "coordinator": "yellow",
    "agent": "blue",
}

STATE_STYLES: Mapping[str, str] = {
    "running": "green", "done": "green", "ok": "green", "unchanged": "green", "created": "cyan", "updated": "cyan",
    "waiting": "yellow", "starting": "yellow", "placing": "yellow", "submitted": "yellow", "stopping": "yellow",
    "stopped": "yellow", "unknown": "yellow", "failed": "bold red", "lost": "bold red", "unreachable": "bold red",
}  # fmt: skip


def state_text(state: str) -> Text:
    """Return a state in its colour."""
    return Text(state, style=STATE_STYLES.get(state, ""))


def rank_lines(rank: str, host: str, text: str, glyphs: Glyphs) -> list[Text]:
    """Return the sanitized output of a process, each line after its rank and host: `worker/3 node-b │ text`."""
    rank = one_line(rank)
    style = ROLE_STYLES.get(rank.partition("/")[0], "")
    prefix = f"{rank} {host} {glyphs.bar}" if host else f"{rank} {glyphs.bar}"
    return [Text.assemble((prefix, style), " ", line) for line in sanitize(text).split("\n")]
