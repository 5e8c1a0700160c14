"""Sizes, rates and durations are read exactly and printed readably."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl import units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("160MB", 160_000_000),
        ("1MiB", 1_048_576),
        ("1.5 GiB", 1_610_612_736),
        ("0.1 GB", 100_000_000),
        ("1KB", 1000),
        ("1kB", 1000),
        ("4096", 4096),
        (" 7 B ", 7),
    ],
)
def test_sizes_are_exact_bytes(text: str, count: int) -> None:
    assert units.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MB", "160 mb", "1e3MB", "-1MB", "0.3B", "nan", "1" * 5000, "1 GB/s", "٣MB"])
def test_a_wrong_size_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a size|unknown unit|whole number|too long"):
        units.parse_size(text)


def test_a_wrong_unit_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match='"160 Mb": unknown unit "Mb"; sizes are in B, kB, MB'):
        units.parse_size("160 Mb")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25 Gbit/s", 3.125e9), ("10Gbps", 1.25e9), ("3 GB/s", 3e9), ("62.5 MB/s", 62.5e6), ("8 bit/s", 1.0)],
)
def test_rates_are_bytes_per_second(text: str, rate: float) -> None:
    assert units.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["25", "25 Gbit", "Gbit/s", "25 G"])
def test_a_rate_needs_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match="Gbit/s"):
        units.parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("500ms", 0.5), ("50 us", 5e-5), ("50µs", 5e-5), ("1h30m", 5400), ("1h 30m", 5400), ("0", 0),
     ("2d", 172800), ("1.5s", 1.5), ("10ns", 1e-8)],
)  # fmt: skip
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 minutes", "30m1h", "5m5m", "m", "1h-30m", "5msec", "-5s", "5 m s"])
def test_a_wrong_duration_names_the_valid_units(text: str) -> None:
    with pytest.raises(ValueError, match="units are d, h, m, s, ms, us, ns"):
        units.parse_duration(text)


@given(st.integers(0, 10**15), st.sampled_from(sorted(units.SIZES)))
def test_every_whole_size_reads_back(count: int, unit: str) -> None:
    assert units.parse_size(f"{count}{unit}") == count * units.SIZES[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    for parse in (units.parse_size, units.parse_rate, units.parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (57_523, "57.5 kB"), (1_200_000_000, "1.2 GB"), (999_950, "1 MB"), (160e6, "160 MB")],
)
def test_bytes_are_printed_in_three_digits(count: float, text: str) -> None:
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (5e-5, "50 us"), (0.0125, "12.5 ms"), (3.25, "3.25 s"), (59.99, "1m00s"), (90, "1m30s"),
     (7500, "2h05m"), (273600, "3d04h"), (3e-9, "3 ns"), (float("inf"), "-"), (-2, "-2 s"), (3599.9, "1h00m"),
     (0.99999, "1 s")],
)  # fmt: skip
def test_seconds_are_printed_for_people(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_rates_and_counts_are_printed_for_people() -> None:
    assert units.format_rate(3.125e9) == "3.12 GB/s"
    assert [units.format_count(n) for n in (0, 512, 9999, 12_345, 1_234_567, 0.5)] == [
        "0", "512", "9,999", "12.3k", "1.23M", "0.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e9", 10**9), ("7B", 7 * 10**9), ("1.5M", 1_500_000), ("10_000_000", 10**7), ("12", 12), ("2.5e3k", 2_500_000)],
)
def test_counts_are_read(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "1.5", "1e-3", "7 B", "many", "1e999", "-3", "1" * 50])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match=r"count|whole|long"):
        units.parse_count(text)
