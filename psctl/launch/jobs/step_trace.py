"""The times of steps of all workers on one clock: the critical path of each step, and the trace file. Pure.

A host's clock is moved by the offset that its agent measured. In a step the critical path goes through the worker that
was ready last: the one that ended its own computation last, before it waited for others. Until then it determines the
step's duration, after that synchronization and update do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.process.step_ring import OVERLAPPING
from psctl.types import JsonObject

CRITICAL = 1_000_000
"""The process number of the critical path in the trace file, below all workers."""

SECOND = 1e9

_OUTSIDE = ("checkpoint", *OVERLAPPING)
"""Kinds of spans that may lie outside of their step, or in parallel with its other parts."""

_LANES = {"step": 0, "push": 2, "pull": 3}
"""By kind: the thread number in the trace file, if it is not 1."""


class Span(msgspec.Struct, frozen=True):
    """A part of a step of one worker; times in nanoseconds of the coordinator's clock."""

    rank: int
    kind: str
    step: int
    begin: int
    end: int


class CriticalPath(msgspec.Struct, frozen=True):
    """A step's critical path; seconds.

    Args:
        step: the step.
        seconds: from its begin on the first worker to its end on the last.
        last: the rank that was ready last.
        behind: how long after the second last.
        load: that it took to get its batch.
        wait: that it waited for others before it was ready, for the values of the step before.
        compute: the rest until it was ready.
        after: from then to the step's end: synchronization and update.
    """

    step: int
    seconds: float
    last: int
    behind: float
    load: float
    wait: float
    compute: float
    after: float


def critical_paths(spans: Iterable[Span]) -> list[CriticalPath]:
    """Return the critical path of every step that at least one worker has finished, by step."""
    steps: dict[int, dict[int, list[Span]]] = {}
    for span in spans:
        if span.kind not in _OUTSIDE:
            steps.setdefault(span.step, {}).setdefault(span.rank, []).append(span)
    return [
        _path(step, ranks)
        for step, ranks in sorted(steps.items())
        if any(span.kind == "step" for each in ranks.values() for span in each)
    ]


def _path(step: int, ranks: dict[int, list[Span]]) -> CriticalPath:
    ready = {rank: _ready(spans) for rank, spans in ranks.items()}
    last = max(ready, key=lambda rank: (ready[rank], -rank))
    begin = min(span.begin for spans in ranks.values() for span in spans)
    end = max(span.end for spans in ranks.values() for span in spans)
    second = max((at for rank, at in ready.items() if rank != last), default=ready[last])
    mine = [span for span in ranks[last] if span.end <= ready[last]]
    load = sum(span.end - span.begin for span in mine if span.kind == "load")
    wait = sum(span.end - span.begin for span in mine if span.kind == "synchronize")
    compute = max(0, ready[last] - begin - load - wait)
    parts = (end - begin, ready[last] - second, load, wait, compute, end - ready[last])
    seconds, behind, load_, wait_, compute_, after = (part / SECOND for part in parts)
    return CriticalPath(step, seconds, last, behind, load_, wait_, compute_, after)


def _ready(spans: Sequence[Span]) -> int:
    """Return when a worker has computed its gradients; where that is not known, when it began to update."""
    computed = [span.end for span in spans if span.kind in ("backward", "compute")]
    others = [span.begin for span in spans if span.kind == "update"] or [max(span.end for span in spans)]
    return max(computed) if computed else max(others)


def trace_file(
    job: str,
    spans: Sequence[Span],
    paths: Sequence[CriticalPath],
    hosts: dict[int, str],
    clocks: dict[str, float | None],
) -> JsonObject:
    """Return the document of a trace file, which chrome://tracing and Perfetto show.

    Args:
        job: its name.
        spans: of all workers.
        paths: of the steps.
        hosts: the host of each rank.
        clocks: by host, the most by which its clock is wrong, in seconds; None: unknown.
    """
    start = min((span.begin for span in spans), default=0)
    events: list[JsonObject] = []
    for rank, host in sorted(hosts.items()):
        events.append(_named("process_name", rank, {"name": f"worker/{rank} on {host}"}))
        events.append(_named("process_sort_index", rank, {"sort_index": rank}))
    events.append(_named("process_name", CRITICAL, {"name": "critical path"}))
    for span in spans:
        lane = _LANES.get(span.kind, 1)
        name = f"step {span.step}" if span.kind == "step" else span.kind
        events.append(_complete(name, span.rank, lane, span.begin - start, span.end - span.begin, {"step": span.step}))
    inside = [span for span in spans if span.kind not in _OUTSIDE]
    begins = {step: min(span.begin for span in inside if span.step == step) for step in {span.step for span in inside}}
    for path in paths:
        begin, after = begins[path.step] - start, round(path.after * SECOND)
        before = round(path.seconds * SECOND) - after
        told = {"step": path.step, "behind_ms": path.behind * 1e3}
        events.append(_complete(f"worker/{path.last}", CRITICAL, 0, begin, before, told))
        events.append(_complete("synchronize, update", CRITICAL, 0, begin + before, after, told))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"job": job, "clock_error_seconds": dict(clocks)},
    }


def _named(kind: str, process: int, arguments: JsonObject) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": process, "tid": 0, "args": arguments}


def _complete(
    name: str, process: int, lane: int, begin: int, length: int, arguments: Mapping[str, object]
) -> JsonObject:
    return {
        "ph": "X", "name": name, "cat": "psctl", "pid": process, "tid": lane, "ts": begin / 1e3, "dur": length / 1e3,
        "args": arguments,
    }  # fmt: skip
