"""Sanitizes text from other machines; formats numbers, times and curves as text. Pure; does not use rich."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import time
from collections.abc import Sequence

_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC, whole
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: parameters, intermediates, final
    r"|\x1b[ -/]*[0-~]?",  # other escapes
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction of text
    "\u2028\u2029\ufeff]"
)


def sanitize(text: str) -> str:
    """Return text without control sequences of a terminal; the rest is printable, tabs become spaces, newlines stay.

    Removed are whole escape sequences (CSI, OSC, DCS and their one-byte C1 forms), other control characters, and those
    that change the direction of text. Of a line with carriage returns (a progress bar) the last part stays, as on a
    screen.
    """
    if text.isprintable():
        return text
    text = _ESCAPES.sub("", text.replace("\r\n", "\n"))
    if "\r" in text:
        text = "\n".join(_last_part(line) for line in text.split("\n"))
    text = _CONTROLS.sub("", text).expandtabs(8)
    return text.encode("utf-8", "replace").decode("utf-8")


def _last_part(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def one_line(value: object) -> str:
    """Return a value as one harmless line: newlines and runs of spaces become one space."""
    return " ".join(sanitize(str(value)).split())


def clip(text: str, width: int) -> str:
    """Return at most `width` characters, the last of them … when some were omitted."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Return text as at most `lines` lines of `width` characters; … marks an omission. Names stay whole: char-gpt-3."""
    found = textwrap.wrap(text, max(8, width), break_on_hyphens=False) or [""]
    if len(found) > lines:
        found[lines - 1 :] = [clip(" ".join(found[lines - 1 :]), width)]
    return found


BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-=*%#@"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a curve one line high; more values than `width` are averaged, values that are not finite are omitted."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [round(index * len(finite) / columns) for index in range(columns + 1)]
    means = [math.fsum(value / (b - a) for value in finite[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if not high > low:
        return blocks[0] * columns
    top = len(blocks) - 1
    span = high / top - low / top  # divided first, because the difference of two floats may overflow
    return "".join(blocks[min(top, round((mean / top - low / top) / span * top)) if span else 0] for mean in means)


def split(width: int, first: float, second: float) -> tuple[int, int]:
    """Return how many of `width` cells two amounts get; an amount above zero gets at least one."""
    total = first + second
    if total <= 0 or width < 2:
        return 0, 0
    left = round(width * first / total)
    left = min(max(left, 1 if first > 0 else 0), width - (1 if second > 0 else 0))
    return left, width - left


def number(value: float | None) -> str:
    """Return a metric as text: four significant digits, no trailing zeros; `nan` and `inf` as they are."""
    if value is None:
        return "-"
    return f"{value:.4g}" if not float(value).is_integer() or abs(value) >= 1e6 else f"{value:.0f}"


def clock_time(seconds: float) -> str:
    """Return a time (seconds since the epoch) as local time: 14:02:11."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def date_time(seconds: float) -> str:
    """Return a time with its date: 2026-11-20 14:02."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
