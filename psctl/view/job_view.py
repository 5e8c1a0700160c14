"""What is known of a running job, folded from its events one by one. Pure: times are those of the events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psctl.job import events as kinds
from psctl.view.text import one_line

HISTORY = 240
"""Values of the watched metric that are kept; beyond it every second one goes, so the whole run stays in sight."""

KEPT_EVENTS = 64
FRESH = 300.0
"""Seconds after which an event that is no error is old news."""

ERROR, WARNING, INFO = 2, 1, 0


@dataclass
class RankState:
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
        """How users name it: worker/3."""
        return f"{self.role}/{self.rank}"


@dataclass
class Happening:
    """Something worth a line. `count` tells how often it came in a row."""

    time: float
    severity: int
    text: str
    count: int = 1


@dataclass
class LiveState:
    """The picture of a job. Feed it with `apply`; read the rest."""

    job: str = ""
    state: str = "submitted"
    hosts: list[str] = field(default_factory=list)
    ranks: dict[tuple[str, int], RankState] = field(default_factory=dict)
    started: float = math.nan
    latest: float = math.nan  # time of the newest event
    progress: kinds.Progress | None = None
    rate: float = 0.0  # steps a second, 0.0 while unknown
    metric: str = ""  # the one whose history is kept
    history: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    checkpoint: kinds.CheckpointWritten | None = None
    plan: kinds.Planned | None = None
    happenings: list[Happening] = field(default_factory=list)
    finished: kinds.Finished | None = None

    def apply(self, event: kinds.AnyEvent) -> None:
        """Take in one event."""
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

    def news(self, limit: int) -> list[Happening]:
        """Return at most `limit` recent events, worst first, then newest first."""
        fresh = [h for h in self.happenings if h.severity == ERROR or h.time >= self.latest - FRESH]
        return sorted(fresh, key=lambda h: (-h.severity, -h.time))[:limit]

    @property
    def step(self) -> int:
        """The furthest step that a worker has told. Progress comes with the script's numbers, which may be rarer."""
        told = self.progress.step if self.progress is not None else 0
        return max([told, *(rank.step for rank in self.ranks.values() if rank.role == "worker")])

    def step_of(self, rank: RankState) -> int:
        """Return the last step a worker has finished: its own word, or at least what all have."""
        known = self.progress.step if self.progress is not None and rank.role == "worker" else 0
        return max(rank.step, known)

    def rate_of(self, rank: RankState) -> float:
        """Return a process's steps a second: its own, else for a running worker the job's."""
        return rank.rate or (self.rate if rank.role == "worker" and rank.state == "running" else 0.0)

    def rank_of(self, role: str, rank: int, host: str = "") -> RankState:
        """Return the process, made when it was not known."""
        found = self.ranks.setdefault((role, rank), RankState(role, rank))
        found.host = one_line(host) or found.host
        return found

    def note(self, time: float, severity: int, text: str) -> None:
        """Keep a line for the list of recent events."""
        text = one_line(text)
        last = self.happenings[-1] if self.happenings else None
        if last is not None and last.text == text:
            last.time, last.count = time, last.count + 1
            return
        self.happenings.append(Happening(time, severity, text))
        del self.happenings[:-KEPT_EVENTS]


def watched(metrics: Mapping[str, float]) -> str:
    """Return the metric to draw: `loss`, else the first whose name has loss in it, else the first; "" without any."""
    names = list(metrics)
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in metrics else (losses or names or [""])[0]


def _started(state: LiveState, event: kinds.Started) -> None:
    state.job, state.hosts, state.started = one_line(event.job), [one_line(host) for host in event.hosts], event.time
    if state.state == "submitted":
        state.state = "starting"
    for role in event.roles:
        state.rank_of(role.role, role.rank, role.host)


def _planned(state: LiveState, event: kinds.Planned) -> None:
    state.plan = event


def _progress(state: LiveState, event: kinds.Progress) -> None:
    before = state.progress
    state.progress = event
    if before is not None and event.time > before.time and event.step > before.step:
        state.rate = (event.step - before.step) / (event.time - before.time)
    state.metric = state.metric or watched(event.metrics)
    value = event.metrics.get(state.metric)
    if value is None or not math.isfinite(value) or (before is not None and before.step == event.step):
        return
    if state.history and event.step < state.history[-1][0] + state.stride:
        return
    state.history.append((event.step, value))
    if len(state.history) > HISTORY:
        del state.history[1::2]
        state.stride = max(1, (state.history[-1][0] - state.history[0][0]) // (len(state.history) - 1))


def _checkpoint(state: LiveState, event: kinds.CheckpointWritten) -> None:
    state.checkpoint = event


def _worker_lost(state: LiveState, event: kinds.WorkerLost) -> None:
    _lost(state, "worker", event.rank, event.host, event.reason, event.time)


def _server_lost(state: LiveState, event: kinds.ServerLost) -> None:
    _lost(state, "server", event.rank, event.host, event.reason, event.time)


def _lost(state: LiveState, role: str, rank: int, host: str, reason: str, time: float) -> None:
    found = state.rank_of(role, rank, host)
    found.state, found.last_error, found.rate = "lost", one_line(reason), 0.0
    state.note(time, ERROR, f"{found.name} on {found.host} was lost: {reason}")


def _joined(state: LiveState, event: kinds.WorkerJoined) -> None:
    found = state.rank_of("worker", event.rank, event.host)
    found.state, found.last_error = "running", ""
    state.note(event.time, INFO, f"{found.name} on {found.host} takes part")


def _restored(state: LiveState, event: kinds.Restored) -> None:
    state.history = [entry for entry in state.history if entry[0] <= event.step]
    state.progress, state.rate = None, 0.0
    for rank in state.ranks.values():
        rank.step, rank.step_time, rank.rate = event.step, math.nan, 0.0
    where = f"{event.checkpoint} (step {event.step:,})" if event.checkpoint else "its start values"
    again = f"; {event.lost:,} steps are done again" if event.lost else ""
    state.note(event.time, INFO, f"continues from {where}{again}")


def _log(state: LiveState, event: kinds.Log) -> None:
    """Lines are shown, not kept."""


def _finished(state: LiveState, event: kinds.Finished) -> None:
    state.finished, state.state = event, event.status
    for rank in state.ranks.values():
        rank.rate = 0.0


def _state(state: LiveState, event: kinds.StateChanged) -> None:
    if event.role == "job":
        state.state = event.state
        return
    found = state.rank_of(event.role, event.rank, event.host)
    if found.state != event.state:  # steps count from here on: what a process did before it ran was no training
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


def _notice(state: LiveState, event: kinds.Notice) -> None:
    state.note(event.time, WARNING, event.text)


_APPLY: Mapping[type, Callable[[LiveState, Any], None]] = {
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
