"""What a page shows of one job, from its events. Pure: times are those of the events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from psctl.job import events as kinds
from psctl.job.activity import PARTS
from psctl.launch.jobs.step_trace import SECOND, Span, critical_paths
from psctl.process.step_ring import KINDS
from psctl.types import Document
from psctl.view.job_view import JobView
from psctl.view.run_summary import RunSummary
from psctl.view.series import Series
from psctl.view.text import one_line, sanitize

POINTS = 2000
"""Values of a series that are kept."""

SPANS = 400
"""Changes of a process that are kept; beyond it every second one that only changes its load is dropped."""

LINES = 2000
"""Printed lines that are kept, at least; twice as many before the oldest are dropped."""

NOTES = 500
CHECKPOINTS = 500

WORST_FIRST = ("", "info", "warning", "error")


class HostRates:
    """What a host's network interface sent and received over time, in bytes/s."""

    def __init__(self) -> None:
        self._sent, self._received = Series(POINTS), Series(POINTS)
        self._capacity = 0.0

    def add(self, event: kinds.HostTraffic, began: float) -> None:
        """Add the rates of an event of a job that began at `began`. The series count seconds, not steps."""
        second = 0 if math.isnan(began) else round(event.time - began)
        self._sent.add(second, event.time, event.sent)
        self._received.add(second, event.time, event.received)
        self._capacity = event.capacity

    def document(self, began: float) -> Document:
        """Return both series as JSON values; seconds count from `began`."""
        sent, received = series_document(self._sent, began), series_document(self._received, began)
        return {"sent": sent, "received": received, "capacity": self._capacity}


def series_document(series: Series, began: float) -> Document:
    """Return a series as JSON values; seconds count from `began`."""
    seconds = [round(time - began, 3) for time in series.times]
    return {"steps": list(series.steps), "seconds": seconds, "values": list(series.values)}


class JobHistory:
    """What is known of a job; `apply` adds an event.

    Args:
        job: its name.
        cluster: its cluster's name.
    """

    def __init__(self, job: str, cluster: str) -> None:
        self.job = job
        self._cluster = one_line(cluster)
        self._view = JobView(kept_events=NOTES)
        self._summary = RunSummary()
        self._metrics: dict[str, Series] = {}
        self._rates: dict[str, Series] = {}
        self._spans: dict[str, list[tuple[float, str, tuple[int, ...]]]] = {}
        self._traffic: dict[str, HostRates] = {}
        self._last_steps: dict[int, kinds.LastSteps] = {}
        self._flows: kinds.HostFlows | None = None
        self._gpus: dict[str, list[kinds.GpuState]] = {}
        self._checkpoints: list[kinds.CheckpointWritten] = []
        self._lines: list[tuple[float, str, str, str]] = []
        self._dropped = 0

    def apply(self, event: kinds.AnyEvent) -> None:
        """Add an event."""
        self._view.apply(event)
        self._summary.apply(event)
        match event:
            case kinds.Progress():
                self._on_progress(event)
            case kinds.Restored():
                self._last_steps.clear()  # of workers before the loss
                for series in (*self._metrics.values(), *self._rates.values()):
                    series.cut(event.step)
            case kinds.CheckpointWritten():
                self._checkpoints = [*self._checkpoints[1 - CHECKPOINTS :], event]
            case kinds.StateChanged() if event.role != "job":
                self._add_span(f"{event.role}/{event.rank}", event.time, event.state, _parts_of(event))
            case kinds.HostTraffic():
                host = one_line(event.host)
                self._traffic[host] = self._traffic.get(host) or HostRates()
                self._traffic[host].add(event, self._view.started)
            case kinds.LastSteps():
                self._last_steps[event.rank] = event
            case kinds.HostFlows():
                self._flows = event
            case kinds.HostGpus():
                self._gpus[one_line(event.host)] = event.gpus
            case kinds.WorkerLost():
                self._add_span(f"worker/{event.rank}", event.time, "lost", ())
            case kinds.ServerLost():
                self._add_span(f"server/{event.rank}", event.time, "lost", ())
            case kinds.Log():
                self._lines.append((event.time, one_line(event.rank), event.stream, sanitize(event.text)))
                if len(self._lines) > 2 * LINES:
                    self._dropped += len(self._lines) - LINES
                    del self._lines[:-LINES]

    def document(self) -> Document:
        """Return everything as JSON values, text sanitized; seconds count from the job's start."""
        view = self._view
        began = 0.0 if math.isnan(view.started) else view.started
        last = began if math.isnan(view.latest) else view.latest
        left = view.seconds_left
        return {
            "job": self.job,
            "cluster": self._cluster,
            "hosts": list(view.hosts),
            "state": one_line(view.state),
            "phase": view.phase,
            "started": began,
            "seconds": round(last - began, 3),
            "step": view.step,
            "total": view.total,
            "left": None if math.isnan(left) or view.finished else round(left, 1),
            "summary": [[label, one_line(text)] for label, text in self._summary.lines()],
            "metrics": {one_line(name): series_document(series, began) for name, series in self._metrics.items()},
            "rates": {name: series_document(series, began) for name, series in self._rates.items()},
            "ranks": {rank.name: self._rank(rank.name, began) for rank in view.ranks.values()},
            "traffic": {name: rates.document(began) for name, rates in self._traffic.items()},
            "flows": [
                [one_line(each.source), one_line(each.target), each.rate]
                for each in (self._flows.flows if self._flows is not None else ())
            ],
            "gpus": {
                host: [[one_line(each.name), each.busy, each.used, each.memory] for each in found]
                for host, found in self._gpus.items()
            },
            "steps": self._steps(),
            "plan": self._plan(),
            "checkpoints": [
                {"step": each.step, "at": round(each.time - began, 3), "bytes": each.bytes, "seconds": each.seconds,
                 "path": one_line(each.path)}
                for each in self._checkpoints
            ],
            "notes": [
                {"at": round(each.time - began, 3), "level": WORST_FIRST[each.severity + 1], "text": each.text,
                 "count": each.count}
                for each in view.recent_events
            ],
            "lines": [[round(time - began, 3), rank, stream, text] for time, rank, stream, text in self._lines],
            "dropped": self._dropped,
            "failure": harmless(view.finished.failure) if view.finished and view.finished.failure else None,
        }  # fmt: skip

    def _rank(self, name: str, began: float) -> Document:
        role, _, index = name.partition("/")
        rank, view = self._view.ranks[role, int(index)], self._view
        return {
            "host": rank.host, "state": one_line(rank.state), "step": view.step_of(rank), "rate": view.rate_of(rank),
            "cpu": rank.cpu, "memory": rank.memory, "sync": rank.sync, "sends": rank.sends,
            "receives": rank.receives, "gpu": rank.gpu, "gpu_memory": rank.gpu_memory,
            "error": rank.last_error,
            "spans": [[round(time - began, 3), state, parts] for time, state, parts in self._spans.get(name, [])],
        }  # fmt: skip

    def _steps(self) -> Document | None:
        """Return the times of the last steps of workers that have ended; None without any."""
        found = self._last_steps.values()
        if not found:
            return None
        spans = [Span(each.rank, kind, step, begin, end) for each in found for kind, step, begin, end in each.spans]
        spans = sorted((span for span in spans if span.kind in KINDS), key=lambda span: span.begin)
        clocks = {each.host: 0.0 if each.exact else None for each in found}
        return steps_document(spans, clocks, {each.rank: each.host for each in found})

    def _plan(self) -> Document | None:
        plan, summary = self._view.plan, self._summary
        if plan is None:
            return None
        candidates = [
            {
                "strategy": one_line(each.strategy),
                "params": ", ".join(f"{one_line(key)} {_text_of(value)}" for key, value in each.params.items()),
                "seconds": each.seconds, "bytes": each.bytes_per_rank, "bottleneck": one_line(each.bottleneck or ""),
                "why_not": one_line(each.why_not or ""),
            }
            for each in plan.candidates
        ]  # fmt: skip
        measured = (summary.sync + summary.hidden) / summary.steps if summary.steps else None
        return {
            "chosen": one_line(plan.chosen), "reason": one_line(plan.reason), "size": plan.size, "world": plan.world,
            "sums": one_line(plan.sums), "candidates": candidates, "measured": measured,
        }  # fmt: skip

    def _on_progress(self, event: kinds.Progress) -> None:
        for name, value in event.metrics.items():
            self._metrics.setdefault(name, Series(POINTS)).add(event.step, event.time, value)
        rates = {
            "examples_per_second": event.examples_per_second, "bytes_per_second": event.bytes_per_second,
            "compute": event.compute_seconds, "sync": event.sync_seconds, "hidden": event.hidden_seconds,
        }  # fmt: skip
        for name, value in rates.items():
            self._rates.setdefault(name, Series(POINTS)).add(event.step, event.time, value)

    def _add_span(self, rank: str, time: float, state: str, parts: tuple[int, ...]) -> None:
        spans = self._spans.setdefault(rank, [])
        state = one_line(state)
        if spans and spans[-1][1:] == (state, parts):
            return
        spans.append((time, state, parts))
        if len(spans) > SPANS:
            load = [i for i in range(1, len(spans)) if spans[i][1] == spans[i - 1][1]]
            for index in reversed(load[::2] or [0]):
                del spans[index]


def _parts_of(event: kinds.StateChanged) -> tuple[int, ...]:
    """Return the percent of a worker's time in each of PARTS, in steps of five: a change of one is none to be seen."""
    if event.role != "worker" or not (event.parts or event.sync):
        return ()
    found = event.parts or {"compute": 100 - event.sync, "sync": event.sync}
    return tuple(5 * round(found.get(name, 0) / 5) for name in PARTS)


def steps_document(spans: Sequence[Span], clocks: Mapping[str, float | None], hosts: Mapping[int, str]) -> Document:
    """Return what a page shows of the times of steps: the parts by worker, and the critical path of each step.

    Args:
        spans: of all workers, on one clock.
        clocks: by host, the most by which its clock is wrong, in seconds; None: unknown.
        hosts: the host of each rank.
    """
    start = min((span.begin for span in spans), default=0)
    lanes: dict[str, list[list[object]]] = {f"worker/{rank}": [] for rank in sorted(hosts)}
    for span in spans:
        if span.kind != "step":
            begin, end = ((at - start) / SECOND for at in (span.begin, span.end))
            lanes[f"worker/{span.rank}"].append([span.kind, span.step, round(begin, 6), round(end, 6)])
    known = [error for error in clocks.values() if error is not None]
    return {
        "lanes": lanes,
        "seconds": max((span.end - start for span in spans), default=0) / SECOND,
        "paths": [
            {**msgspec.structs.asdict(path), "last": f"worker/{path.last} on {one_line(hosts.get(path.last, ''))}"}
            for path in critical_paths(spans)
        ],
        "clock_error": max(known) if known and len(known) == len(clocks) else None,
    }


def _text_of(value: object) -> str:
    return one_line(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def harmless(value: object) -> object:
    """Return a JSON value with all of its text sanitized."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, Mapping):
        return {one_line(key): harmless(each) for key, each in value.items()}
    return [harmless(each) for each in value] if isinstance(value, list | tuple) else value
