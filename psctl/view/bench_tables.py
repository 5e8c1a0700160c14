"""What `bench` prints for people: every strategy at every size, the fastest marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from psctl.units import format_bytes, format_rate, format_seconds
from psctl.view.console import say
from psctl.view.tables import Cell, draw_table


def draw_bench(console: Console, document: Mapping[str, Any]) -> None:
    """Draw the result of `bench`: by size, the fastest first; then what `auto` would take.

    Args:
        console: where to.
        document: as `bench -o json` prints it.
    """
    winners = {each["bytes"]: each for each in document["sizes"]}
    rows: list[list[Cell]] = []
    for row in sorted(document["results"], key=lambda each: (each["bytes"], each["seconds"]["median"])):
        rows.append(_row(row, winners.get(row["bytes"], {}).get("winner") == row["strategy"]))
    heads = ("size", "strategy", "median", "min", "max", "algbw", "busbw", "predicted", "of measured", "sum")
    draw_table(
        console, heads, rows, right=("size", "median", "min", "max", "algbw", "busbw", "predicted", "of measured")
    )
    for size in document["sizes"]:
        say(console, _sentence(size))
    if "congestion" in document:
        say(console, _congestion(document["congestion"]))


def _row(row: Mapping[str, Any], won: bool) -> list[Cell]:
    seconds, predicted = row["seconds"], row["predicted_seconds"]
    share = "-" if predicted is None or not seconds["median"] else f"{predicted / seconds['median']:.2f}"
    name: Cell = (f"{row['strategy']} *", "bold green") if won else row["strategy"]
    return [
        format_bytes(row["bytes"]), name, format_seconds(seconds["median"]), format_seconds(seconds["min"]),
        format_seconds(seconds["max"]), format_rate(row["algbw"]), format_rate(row["busbw"]),
        format_seconds(predicted) if predicted is not None else "-", share,
        "right" if row["correct"] else ("WRONG", "bold red"),
    ]  # fmt: skip


def _sentence(size: Mapping[str, Any]) -> str:
    won = f"{format_bytes(size['bytes'])}: {size['winner']} is the fastest"
    if size["auto"] == size["winner"]:
        return f"{won}, and what auto takes"
    if size["regret"] is None:
        return f"{won}; auto would take {size['auto']}, which was not measured"
    return f"{won}; auto would take {size['auto']}, {size['regret']:.0%} slower"


def _congestion(found: Mapping[str, Any]) -> str:
    each = ", ".join(f"{one['congestion']} {format_seconds(one['seconds']['median'])}" for one in found["measured"])
    if found["recommended"] == found["now"]:
        return f"congestion control: {each}; stay with {found['now']}"
    return f"congestion control: {each}; set network: {{congestion: {found['recommended']}}} in the cluster file"
