"""The critical path of steps, and the trace file."""

from __future__ import annotations

import json

import pytest

from psctl import errors
from psctl.launch.jobs.step_times import MOST, parse_steps
from psctl.launch.jobs.step_trace import CRITICAL, CriticalPath, Span, critical_paths, trace_file

MS = 1_000_000


def worker(rank: int, step: int, at: int, load: int, wait: int, compute: int, sync: int, update: int) -> list[Span]:
    """Return the spans of a step: a wait for the step before stands between load and computation; milliseconds."""
    edges = [at]
    for part in (load, wait, compute, sync, update):
        edges.append(edges[-1] + part)
    kinds = ("load", "synchronize", "backward", "synchronize", "update")
    spans = [Span(rank, kind, step, edges[i] * MS, edges[i + 1] * MS) for i, kind in enumerate(kinds)]
    return [*spans, Span(rank, "step", step, at * MS, edges[-1] * MS)]


def test_the_path_goes_through_the_worker_that_was_ready_last() -> None:
    spans = worker(0, 7, 0, 1, 2, 10, 9, 1) + worker(1, 7, 1, 2, 3, 15, 1, 1)
    assert critical_paths(spans) == [CriticalPath(7, 0.023, 1, 0.008, 0.002, 0.003, 0.016, 0.002)]
    path = critical_paths(spans)[0]
    assert path.load + path.wait + path.compute + path.after == pytest.approx(path.seconds)


def test_a_step_that_nobody_has_finished_is_left_out_and_a_checkpoint_belongs_to_none() -> None:
    spans = worker(0, 7, 0, 1, 2, 10, 9, 1) + worker(0, 8, 100, 1, 2, 10, 9, 1)[:3]
    spans.append(Span(0, "checkpoint", 7, 24 * MS, 90 * MS))
    paths = critical_paths(spans)
    assert [path.step for path in paths] == [7]
    assert paths[0].seconds == pytest.approx(0.023)
    assert paths[0].behind == 0, "alone it is not behind another one"
    assert critical_paths([]) == []


def test_the_file_has_every_worker_and_the_critical_path_in_microseconds() -> None:
    spans = worker(0, 7, 5, 1, 2, 10, 9, 1) + worker(1, 7, 6, 2, 3, 15, 1, 1)
    document = json.loads(
        json.dumps(trace_file("mine-1", spans, critical_paths(spans), {0: "h0", 1: "h1"}, {"h0": 0.0, "h1": None}))
    )
    events = document["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {0: "worker/0 on h0", 1: "worker/1 on h1", CRITICAL: "critical path"}
    drawn = [each for each in events if each["ph"] == "X"]
    assert len(drawn) == len(spans) + 2
    first = next(each for each in drawn if each["name"] == "step 7" and each["pid"] == 0)
    assert (first["ts"], first["dur"]) == (0, 23_000)
    path = [(each["name"], each["ts"], each["dur"]) for each in drawn if each["pid"] == CRITICAL]
    assert path == [("worker/1", 0, 21_000), ("synchronize, update", 21_000, 2_000)]
    assert document["otherData"] == {"job": "mine-1", "clock_error_seconds": {"h0": 0.0, "h1": None}}


def test_pushes_and_pulls_have_lanes_of_their_own_and_change_no_path() -> None:
    plain = worker(0, 7, 10, 1, 2, 10, 9, 1) + worker(1, 7, 11, 2, 3, 15, 1, 1)
    spans = [*plain, Span(0, "pull", 7, 2 * MS, 13 * MS), Span(0, "push", 7, 15 * MS, 40 * MS)]
    paths = critical_paths(plain)
    assert critical_paths(spans) == paths
    events = trace_file("mine-1", spans, paths, {0: "h0", 1: "h1"}, {"h0": 0.0, "h1": 0.0})["traceEvents"]
    lanes = {each["name"]: (each["tid"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"}
    assert (lanes["pull"], lanes["push"]) == ((3, 0, 11_000), (2, 13_000, 25_000))
    assert next(each for each in events if each["pid"] == CRITICAL and each["ph"] == "X")["ts"] == 8_000


def test_steps_are_a_range() -> None:
    assert parse_steps("100:110") == (100, 110)
    assert parse_steps("7") == (7, 7)
    for wrong in ("", ":", "a:b", "0:3", "5:4", "1:", ":3", "-1:3", "1:2:3", f"1:{MOST + 1}"):
        with pytest.raises(errors.UsageError, match="--steps"):
            parse_steps(wrong)
