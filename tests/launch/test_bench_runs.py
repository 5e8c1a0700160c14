"""What `bench` makes of its command line, and of what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from psctl.errors import UsageError
from psctl.job.bench_messages import (
    BenchEffort,
    BenchProgress,
    BenchQuestion,
    BenchRound,
    BenchRow,
    from_line,
    question_of,
    to_line,
)
from psctl.launch.bench.bench_runs import (
    BenchJob,
    BenchRequest,
    BenchResult,
    LikelyStrategies,
    bus_factor,
    sizes_of,
    strategies_of,
    wanted,
)


def test_sizes_go_by_powers_of_four_up_to_the_given_end() -> None:
    assert sizes_of("1KB:16KB") == [1_000, 4_000, 16_000]
    assert sizes_of("1KB:20KB") == [1_000, 4_000, 16_000, 20_000]
    assert sizes_of("1MB:1MB") == [1_000_000]
    assert sizes_of("25MB,1MB, 100MB,1MB") == [1_000_000, 25_000_000, 100_000_000]
    assert sizes_of("1003B") == [1_000]
    default = sizes_of(None)
    assert (default[0], default[1], default[-1], len(default)) == (1_000, 4_000, 256_000_000, 10)


@pytest.mark.parametrize("text", ["", "big", "1KB:", ":1KB", "2MB:1MB", "3B", "1KB,,2KB", "1KB:2KB:3KB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        sizes_of(text or ",")


def test_strategies_are_names_or_all() -> None:
    assert strategies_of(None, "allreduce") == strategies_of("all", "allreduce") == []
    assert strategies_of("ring, native,ring", "allreduce") == ["ring", "native"]
    assert strategies_of(None, "pushpull") == strategies_of("ps", "pushpull") == ["ps"]
    for text, operation in (("rings", "allreduce"), ("", "allreduce"), ("auto", "allreduce"), ("ring", "pushpull")):
        with pytest.raises(UsageError):
            strategies_of(text, operation)  # type: ignore[arg-type]


def test_a_record_is_what_is_promised() -> None:
    row = BenchRow("allreduce", "ring", 8_000_000, 4, [0.25, 0.125, 0.5], True)
    assert BenchResult(row, 0.2).document() == {
        "operation": "allreduce", "strategy": "ring", "bytes": 8_000_000, "world": 4,
        "seconds": {"min": 0.125, "median": 0.25, "max": 0.5}, "algbw": 32e6, "busbw": 48e6,
        "predicted_seconds": 0.2, "correct": True,
    }  # fmt: skip
    assert (bus_factor("allreduce", 8), bus_factor("pushpull", 8)) == (1.75, 1.0)


def test_the_job_is_one_like_others_and_holds_the_question(tmp_path: Path) -> None:
    question = BenchQuestion("pushpull", [BenchRound(4_000, {"ps": {}})])
    asked = wanted(tmp_path, BenchRequest("pushpull", [4_000], [], workers="3", servers="2"), BenchJob(question, "ps"))
    job = asked.job
    assert (job.name, job.module, job.workers, job.servers) == ("bench", "psctl.worker.bench_script", 3, 2)
    assert (job.sync.strategy, job.sync.update, job.checkpoint.every) == ("ps", "worker", None)
    assert question_of((tmp_path / job.args[0]).read_bytes()) == question
    native = wanted(tmp_path, BenchRequest("allreduce", [4_000], [], servers="2"), BenchJob(question, "native"))
    assert (native.job.servers, native.job.workers) == ("auto", "auto")


def test_answers_travel_as_marked_lines() -> None:
    for answer in (BenchProgress(5, 2, ["ring"]), BenchRow("allreduce", "ring", 8, 2, [0.5], False)):
        assert from_line(to_line(answer)) == answer
    assert from_line("NCCL version 2.21") is None
    with pytest.raises(msgspec.DecodeError):
        from_line(to_line(BenchProgress(5, 2, []))[:-2])


def test_measuring_ends_by_count_time_and_patience() -> None:
    effort = BenchEffort(least=3, most=6, seconds=1.0, slow=10.0)
    assert not effort.enough([])
    assert not effort.enough([9.0])
    assert effort.enough([11.0])  # so slow that once must do
    assert not effort.enough([0.2] * 3)
    assert effort.enough([0.2] * 5)
    assert effort.enough([0.01] * 6)
    assert effort.enough([0.5] * 3)
    assert effort.enough([0.005] * 3, repeats=100)  # each stands for half a second


def test_only_the_fastest_are_measured_several_times_where_they_alone_matter() -> None:
    effort, once = BenchEffort(least=3, seconds=0.1, slower=1.5), {"ring": 1, "tree": 1, "root": 1}
    assert effort.unfinished({"ring": [], "tree": [], "root": []}, once) == ["ring", "tree", "root"]
    assert effort.unfinished({"ring": [0.1], "tree": [0.14], "root": []}, once) == ["ring", "tree", "root"]
    assert effort.unfinished({"ring": [0.1], "tree": [0.14], "root": [0.16]}, once) == ["ring", "tree"]
    assert effort.unfinished({"ring": [0.1] * 2, "tree": [0.14] * 2, "root": [0.16]}, once) == ["ring"]
    assert effort.unfinished({"ring": [0.1] * 3, "tree": [0.13] * 2, "root": [0.16]}, once) == ["tree"]
    assert effort.unfinished({"ring": [0.1] * 3, "tree": [0.13] * 3, "root": [0.16]}, once) == []
    every = BenchEffort(least=3)
    assert every.unfinished({"ring": [0.1], "tree": [9.0], "root": [9.0]}, once) == ["ring", "tree", "root"]


def test_likely_strategies_are_near_the_fastest_prediction_and_take_a_limited_time() -> None:
    likely = LikelyStrategies(factor=3.0, seconds=1.0)
    assert likely.among({"a": 0.02, "b": 0.01, "c": 0.031, "d": 0.029}) == ["b", "a", "d"]
    slow = {name: 0.1 + at / 100 for at, name in enumerate("abcdef")}
    assert likely.among(slow) == ["a", "b", "c"]  # always three, and no more than a second
    assert likely.among({"a": 0.0, "b": 0.0}) == ["a", "b"]
