"""Sizes, rates and durations: text parsed into bytes, bytes/s and seconds, and formatted again.

MB is 10^6 bytes and MiB is 2^20; a bit is an eighth of a byte; durations may be compound ("1h30m"). Numbers are read as
exact fractions, so that "0.1 GB" is 100,000,000 bytes and not one less.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

SIZES: dict[str, int] = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip
"""Bytes in each unit of size."""

RATES: dict[str, Fraction] = {f"{unit}/s": Fraction(count) for unit, count in SIZES.items()} | {
    f"{prefix}{bit}": Fraction(10**power, 8)
    for prefix, power in (("", 0), ("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12))
    for bit in ("bit/s", "bps")
}
"""Bytes/s in each unit of rate."""

DURATIONS: dict[str, Fraction] = {
    "d": Fraction(86400), "h": Fraction(3600), "m": Fraction(60), "s": Fraction(1),
    "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "ns": Fraction(1, 10**9),
}  # fmt: skip
"""Seconds in each unit of time."""

COUNTS = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12}
"""Powers of ten of counts; B is a billion, as models are called."""

LONGEST = 40
"""Most characters of a quantity; longer text is refused."""

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_QUANTITY = re.compile(rf"({_NUMBER}) ?([A-Za-z/µ]*)", re.ASCII)
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)(?:[eE]\+?([0-9]{1,2}))?([kKMGBT]?)", re.ASCII)
_PART = re.compile(rf"({_NUMBER}) ?(d|h|ms|m|s|us|µs|ns) ?", re.ASCII)


def parse_size(text: str) -> int:
    """Read a size such as "160MB", "1.5 GiB" or "4096" (bytes).

    Returns:
        Whole bytes.

    Raises:
        ValueError: no number, an unknown unit, or not a whole number of bytes; the message names the valid units.
    """
    number, unit = _split(text, "a size such as 160MB", "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    if unit and unit not in SIZES:
        raise ValueError(f'"{text}": unknown unit "{unit}"; sizes are in B, kB, MB, GB, TB, KiB, MiB, GiB, TiB')
    size = number * SIZES.get(unit, 1)
    if size.denominator != 1:
        raise ValueError(f'"{text}": not a whole number of bytes')
    return int(size)


def parse_count(text: str) -> int:
    """Read a large count such as "1e9", "7B", "1.5M" or "10_000_000".

    Raises:
        ValueError: no number, an unknown unit, not whole, or not above 0.
    """
    short = _short(text)
    match = _COUNT.fullmatch(short)
    if match is None:
        raise ValueError(f'"{short}": expected a count such as 1e9 or 7B; units are k, M, B (billion), T')
    count = Fraction(match[1].replace("_", "")) * 10 ** (int(match[2] or 0) + COUNTS[match[3] or ""])
    if count.denominator != 1 or count < 1:
        raise ValueError(f'"{short}": not a whole number above 0')
    return int(count)


def parse_rate(text: str) -> float:
    """Read a rate such as "25 Gbit/s" or "3 GB/s".

    Returns:
        Bytes per second.

    Raises:
        ValueError: no number or an unknown unit; the message names the valid units.
    """
    units = "bit/s, kbit/s, Mbit/s, Gbit/s, B/s, kB/s, MB/s, GB/s, MiB/s, GiB/s"
    number, unit = _split(text, "a rate such as 25 Gbit/s", units)
    if unit not in RATES:
        raise ValueError(f'"{text}": unknown unit "{unit}"; rates are in {units}')
    return float(number * RATES[unit])


def parse_duration(text: str) -> float:
    """Read a duration such as "5m", "500ms", "50 us" or "1h30m".

    The parts of a compound duration are in falling order, each unit once. "0" needs no unit.

    Returns:
        Seconds.

    Raises:
        ValueError: no number, no unit or an unknown one; the message names the valid units.
    """
    text = _short(text)
    if text == "0":
        return 0.0
    total, position, last = Fraction(0), 0, Fraction(10**9)
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or DURATIONS[part[2]] >= last or (part.end() < len(text) and text[part.end()].isalpha()):
            raise ValueError(f'"{text}": expected a duration such as 30s or 1h30m; units are d, h, m, s, ms, us, ns')
        total += Fraction(part[1]) * DURATIONS[part[2]]
        position, last = part.end(), DURATIONS[part[2]]
    if position == 0:
        raise ValueError('"": expected a duration such as 30s or 1h30m; units are d, h, m, s, ms, us, ns')
    return float(total)


def format_bytes(count: float) -> str:
    """Return bytes as text: "0 B", "57.5 kB", "1.2 GB"."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def format_rate(bytes_per_second: float) -> str:
    """Return bytes per second as text: "3.1 GB/s"."""
    return _scaled(bytes_per_second, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"), " ")


def format_bit_rate(bytes_per_second: float) -> str:
    """Return bytes per second in bits, as networks count: "95.6 Gbit/s"."""
    return _scaled(bytes_per_second * 8, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), " ")


def format_count(count: float) -> str:
    """Return a count as text: "512", "9,999", "12.3k", "1.2M"."""
    if abs(count) < 10_000:
        return f"{count:,.0f}" if float(count).is_integer() or abs(count) >= 100 else f"{count:.3g}"
    return _scaled(count, ("", "k", "M", "G", "T"), "")


def format_seconds(seconds: float) -> str:
    """Return seconds as text: "50 us", "12.5 ms", "3.2 s", "1m30s", "2h05m", "3d04h"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 59.95:
        return _small_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02d}h"


def _small_seconds(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e9)} ns"


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    if not math.isfinite(value):
        return "-"
    index, left = 0, float(value)
    while abs(left) >= 999.5 and index < len(units) - 1:
        index, left = index + 1, left / 1000
    return f"{_three(left)}{gap}{units[index]}"


def _three(value: float) -> str:
    """Return a number with at most three digits, without exponent and trailing zeros."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _split(text: str, what: str, units: str) -> tuple[Fraction, str]:
    text = _short(text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}": expected {what}; units are {units}')
    return Fraction(match[1]), match[2]


def _short(text: str) -> str:
    if len(text) > LONGEST:
        raise ValueError(f'"{text[:LONGEST]}...": too long for a quantity')
    return text.strip()


def hide_credentials(text: str) -> str:
    """Return a text without the user names, passwords and tokens of the URLs in it."""
    return re.sub(r"(?<=://)[^/\s@'\"]*@", "***@", text)
