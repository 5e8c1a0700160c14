"""The state of a running job, as its events describe it. Pure: times are those of the events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psctl.job import events as kinds
from psctl.view.text import one_line

HISTORY = 240
"""Values of the watched metric that are kept; beyond it every second one is dropped, so the whole run stays visible."""

KEPT_EVENTS = 64
FRESH = 300.0
"""Seconds for which an event that is no error is shown."""

ERROR, WARNING, INFO = 2, 1, 0


@dataclass
class RankView:
    """One process. `rate` is steps a second, 0.0 while unknown."""

    role: str
    rank: int
    host: str = ""
    state: str = "starting"
    pid: int = 0
    step: int = 0
    staleness: int = 0
    rate: float = 0.0
    last_error: str = ""
    step_time: float = math.nan

    @property
    def name(self) -> str:
        """Its name for users: worker/3."""
        return f"{self.role}/{self.rank}"


@dataclass
class RecentEvent:
    """An event with a line of its own. `count` is how often it occurred in a row."""

    time: float
    severity: int
    text: str
    count: int = 1


@dataclass
class JobView:
    """The state of a job; `apply` updates it."""

    job: str = ""
    state: str = "submitted"
    hosts: list[str] = field(default_factory=list)
    ranks: dict[tuple[str, int], RankView] = field(default_factory=dict)
    started: float = math.nan
    latest: float = math.nan  # time of the newest event
    progress: kinds.Progress | None = None
    rate: float = 0.0  # steps a second, 0.0 while unknown
    metric: str = ""  # the one whose history is kept
    history: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    checkpoint: kinds.CheckpointWritten | None = None
    plan: kinds.Planned | None = None
    recent_events: list[RecentEvent] = field(default_factory=list)
    finished: kinds.Finished | None = None

    def apply(self, event: kinds.AnyEvent) -> None:
        """Update the state by one event."""
        self.latest = event.time if math.isnan(self.latest) else max(self.latest, event.time)
        _APPLY[type(event)](self, event)

    def host_of(self, rank: str) -> str:
        """Return the host of "worker/3", "" while unknown."""
        role, _, index = rank.partition("/")
        known = self.ranks.get((role, int(index))) if index.isdecimal() else None
        return known.host if known else ""

    def curve(self) -> list[float]:
        """Return the watched metric's values, oldest first."""
        return [value for _, value in self.history]

    def recent(self, limit: int) -> list[RecentEvent]:
        """Return at most `limit` recent events, worst first, then newest first."""
        fresh = [h for h in self.recent_events if h.severity == ERROR or h.time >= self.latest - FRESH]
        return sorted(fresh, key=lambda h: (-h.severity, -h.time))[:limit]

    @property
    def step(self) -> int:
        """The last step that a worker reported. Progress comes with the script's numbers, which may be rarer."""
        reported = self.progress.step if self.progress is not None else 0
        return max([reported, *(rank.step for rank in self.ranks.values() if rank.role == "worker")])

    def step_of(self, rank: RankView) -> int:
        """Return the last step a worker has finished: its own report, or at least the step of all."""
        known = self.progress.step if self.progress is not None and rank.role == "worker" else 0
        return max(rank.step, known)

    def rate_of(self, rank: RankView) -> float:
        """Return a process's steps a second: its own, else for a running worker the job's."""
        return rank.rate or (self.rate if rank.role == "worker" and rank.state == "running" else 0.0)

    def rank_of(self, role: str, rank: int, host: str = "") -> RankView:
        """Return the process; add it when it was unknown."""
        found = self.ranks.setdefault((role, rank), RankView(role, rank))
        found.host = one_line(host) or found.host
        return found

    def note(self, time: float, severity: int, text: str) -> None:
        """Add a line to the list of recent events."""
        text = one_line(text)
        last = self.recent_events[-1] if self.recent_events else None
        if last is not None and last.text == text:
            last.time, last.count = time, last.count + 1
            return
        self.recent_events.append(RecentEvent(time, severity, text))
        del self.recent_events[:-KEPT_EVENTS]


def watched_metric(metrics: Mapping[str, float]) -> str:
    """Return the metric to draw: `loss`, else the first whose name has loss in it, else the first; "" without any."""
    names = list(metrics)
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in metrics else (losses or names or [""])[0]


def _started(state: JobView, event: kinds.Started) -> None:
    state.job, state.hosts, state.started = one_line(event.job), [one_line(host) for host in event.hosts], event.time
    if state.state == "submitted":
        state.state = "starting"
    for role in event.roles:
        state.rank_of(role.role, role.rank, role.host)


def _planned(state: JobView, event: kinds.Planned) -> None:
    state.plan = event


def _progress(state: JobView, event: kinds.Progress) -> None:
    before = state.progress
    state.progress = event
    if before is not None and event.time > before.time and event.step > before.step:
        state.rate = (event.step - before.step) / (event.time - before.time)
    state.metric = state.metric or watched_metric(event.metrics)
    value = event.metrics.get(state.metric)
    if value is None or not math.isfinite(value) or (before is not None and before.step == event.step):
        return
    if state.history and event.step < state.history[-1][0] + state.stride:
        return
    state.history.append((event.step, value))
    if len(state.history) > HISTORY:
        del state.history[1::2]
        state.stride = max(1, (state.history[-1][0] - state.history[0][0]) // (len(state.history) - 1))


def _checkpoint(state: JobView, event: kinds.CheckpointWritten) -> None:
    state.checkpoint = event


def _worker_lost(state: JobView, event: kinds.WorkerLost) -> None:
    _lost(state, "worker", event.rank, event.host, event.reason, event.time)


def _server_lost(state: JobView, event: kinds.ServerLost) -> None:
    _lost(state, "server", event.rank, event.host, event.reason, event.time)


def _lost(state: JobView, role: str, rank: int, host: str, reason: str, time: float) -> None:
    found = state.rank_of(role, rank, host)
    found.state, found.last_error, found.rate = "lost", one_line(reason), 0.0
    state.note(time, ERROR, f"{found.name} on {found.host} was lost: {reason}")


def _joined(state: JobView, event: kinds.WorkerJoined) -> None:
    found = state.rank_of("worker", event.rank, event.host)
    found.state, found.last_error = "running", ""
    state.note(event.time, INFO, f"{found.name} on {found.host} takes part")


def _restored(state: JobView, event: kinds.Restored) -> None:
    state.history = [entry for entry in state.history if entry[0] <= event.step]
    state.progress, state.rate = None, 0.0
    for rank in state.ranks.values():
        rank.step, rank.step_time, rank.rate = event.step, math.nan, 0.0
    where = f"{event.checkpoint} (step {event.step:,})" if event.checkpoint else "its start values"
    again = f"; {event.lost:,} steps are repeated" if event.lost else ""
    state.note(event.time, INFO, f"continues from {where}{again}")


def _log(state: JobView, event: kinds.Log) -> None:
    """Output is shown, not kept."""


def _finished(state: JobView, event: kinds.Finished) -> None:
    state.finished, state.state = event, event.status
    for rank in state.ranks.values():
        rank.rate = 0.0


def _state(state: JobView, event: kinds.StateChanged) -> None:
    if event.role == "job":
        state.state = event.state
        return
    found = state.rank_of(event.role, event.rank, event.host)
    if found.state != event.state:  # steps count from here on: steps before it ran were no training
        found.step, found.step_time = event.step, event.time
    found.state, found.pid, found.staleness = event.state, event.pid or found.pid, event.staleness
    found.last_error = one_line(event.last_error) or ("" if event.state == "running" else found.last_error)
    if event.step > found.step and not math.isnan(found.step_time) and event.time > found.step_time:
        found.rate = (event.step - found.step) / (event.time - found.step_time)
    if event.step != found.step or math.isnan(found.step_time):
        found.step, found.step_time = event.step, event.time
    if found.state != "running":
        found.rate = 0.0
    if found.state == "failed":
        state.note(event.time, ERROR, f"{found.name} on {found.host} failed: {found.last_error or 'no reason given'}")


def _notice(state: JobView, event: kinds.Notice) -> None:
    state.note(event.time, WARNING, event.text)


_APPLY: Mapping[type, Callable[[JobView, Any], None]] = {
    kinds.Started: _started,
    kinds.Planned: _planned,
    kinds.Progress: _progress,
    kinds.CheckpointWritten: _checkpoint,
    kinds.WorkerLost: _worker_lost,
    kinds.WorkerJoined: _joined,
    kinds.ServerLost: _server_lost,
    kinds.Restored: _restored,
    kinds.Log: _log,
    kinds.Finished: _finished,
    kinds.StateChanged: _state,
    kinds.Notice: _notice,
}
