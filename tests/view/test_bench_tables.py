"""The table of bench."""

from __future__ import annotations

import io
from typing import Any

from psctl.view.console import make_console
from psctl.view.tables import draw_bench


def row(strategy: str, median: float, predicted: float | None, correct: bool = True) -> dict[str, Any]:
    return {
        "operation": "allreduce", "strategy": strategy, "bytes": 1_000_000, "world": 4,
        "seconds": {"min": median / 2, "median": median, "max": median * 2}, "algbw": 1e6 / median,
        "busbw": 1.5e6 / median, "predicted_seconds": predicted, "correct": correct,
    }  # fmt: skip


def drawn(document: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    draw_bench(make_console(stream), document)
    return stream.getvalue().splitlines()


def test_the_fastest_comes_first_and_is_marked() -> None:
    lines = drawn(
        {
            "results": [row("native", 0.02, 0.03), row("ring", 0.01, 0.008), row("tree", 0.04, None, correct=False)],
            "sizes": [{"bytes": 1_000_000, "winner": "ring", "auto": "native", "regret": 1.0}],
        }
    )
    assert [line.split("\t")[1] for line in lines[1:4]] == ["ring *", "native", "tree"]
    assert lines[1].split("\t")[2:] == ["10 ms", "5 ms", "20 ms", "100 MB/s", "150 MB/s", "8 ms", "0.80", "right"]
    assert lines[3].split("\t")[7:] == ["-", "-", "WRONG"]
    assert lines[4] == "1 MB: ring is the fastest; auto would take native, 100% slower"


def test_auto_may_be_right_or_not_measured() -> None:
    right = {"bytes": 1_000_000, "winner": "ring", "auto": "ring", "regret": 0.0}
    assert drawn({"results": [row("ring", 0.01, 0.01)], "sizes": [right]})[-1].endswith("and auto takes it")
    other = {**right, "auto": "ps", "regret": None}
    assert drawn({"results": [row("ring", 0.01, 0.01)], "sizes": [other]})[-1].endswith("which was not measured")
