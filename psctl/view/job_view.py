"""The state of a running job, from its events. Pure: times are those of the events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from psctl.job import events as kinds
from psctl.units import format_seconds
from psctl.view.series import Series
from psctl.view.text import one_line

HISTORY = 240
"""Values of the watched metric, and of the throughput, that are kept."""

PACE = 60.0
"""Seconds of progress from which the time that is left is foretold."""

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
    cpu: int = 0  # percent of one core
    memory: int = 0  # bytes
    sync: int = 0  # percent of its time
    sends: float = 0.0  # bytes a second
    receives: float = 0.0  # bytes a second
    gpu: int = 0  # percent of the time that its GPUs are busy
    gpu_memory: int = 0  # bytes
    parts: dict[str, int] = field(default_factory=dict)  # percent of its time
    last_error: str = ""
    step_time: float = math.nan
    joined: bool = False  # a worker that has called psctl.init
    prepared: bool = False  # and run.prepare

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
    pace: deque[tuple[float, int]] = field(default_factory=deque)  # time and step of the progress of the last PACE
    metric: str = ""  # the one whose history is kept
    history: Series = field(default_factory=lambda: Series(HISTORY))
    throughput: Series = field(default_factory=lambda: Series(HISTORY))  # examples/s; steps/s where those are unknown
    checkpoint: kinds.CheckpointWritten | None = None
    plan: kinds.Planned | None = None
    recent_events: list[RecentEvent] = field(default_factory=list)
    kept_events: int = KEPT_EVENTS
    finished: kinds.Finished | None = None
    recovering: kinds.Recovering | None = None  # hosts that the job waits for
    traffic: dict[str, kinds.HostTraffic] = field(default_factory=dict)  # by host
    printed: kinds.Log | None = None  # the last line of a worker: of rank 0, if that one prints
    continues: str = ""  # the checkpoint that the job continues from
    phase: str = ""  # of the start: "starting", "importing", "loading", "connecting", "training"
    phase_since: float = math.nan

    def apply(self, event: kinds.AnyEvent) -> None:
        """Update the state by one event."""
        self._apply(event)
        phase = self._phase()
        if phase != self.phase:
            self.phase, self.phase_since = phase, event.time

    def _phase(self) -> str:
        """Return the phase of the slowest worker."""
        workers = [rank for rank in self.ranks.values() if rank.role == "worker"]
        if any(rank.state == "starting" for rank in self.ranks.values() if rank.role != "reader") or not workers:
            return "starting"
        if not all(rank.joined for rank in workers):
            return "importing"
        if not all(rank.prepared for rank in workers):
            return "loading"
        return "connecting" if any(rank.state == "waiting" for rank in workers) else "training"

    def _apply(self, event: kinds.AnyEvent) -> None:
        self.latest = event.time if math.isnan(self.latest) else max(self.latest, event.time)
        match event:
            case kinds.Started():
                self._on_started(event)
            case kinds.Planned():
                self.plan = event
            case kinds.Progress():
                self._on_progress(event)
            case kinds.CheckpointWritten():
                self.checkpoint = event
            case kinds.WorkerLost():
                self._on_lost("worker", event)
            case kinds.ServerLost():
                self._on_lost("server", event)
            case kinds.WorkerJoined():
                found = self.rank_of("worker", event.rank, event.host)
                found.state, found.last_error, found.joined = "running", "", True
                self.note(event.time, INFO, f"{found.name} on {found.host} takes part")
            case kinds.Restored():
                self._on_restored(event)
            case kinds.StateChanged():
                self._on_state(event)
            case kinds.Recovering():
                self.recovering = event
            case kinds.Recovered():
                self.recovering = None
            case kinds.Finished():
                self.recovering = None
                self.finished, self.state = event, event.status
                for rank in self.ranks.values():
                    rank.rate = 0.0
            case kinds.PlanChecked():
                self.note(event.time, WARNING, plan_check_text(event))
            case kinds.Notice():
                self.note(event.time, WARNING, event.text)
            case kinds.HostTraffic():
                self.traffic[one_line(event.host)] = event
            case kinds.Log():
                self.printed = last_printed(self.printed, event)

    def host_of(self, rank: str) -> str:
        """Return the host of "worker/3", "" while unknown."""
        role, _, index = rank.partition("/")
        known = self.ranks.get((role, int(index))) if index.isdecimal() else None
        return known.host if known else ""

    def recent(self, limit: int) -> list[RecentEvent]:
        """Return at most `limit` recent events, worst first, then newest first."""
        fresh = [h for h in self.recent_events if h.severity == ERROR or h.time >= self.latest - FRESH]
        return sorted(fresh, key=lambda h: (-h.severity, -h.time))[:limit]

    @property
    def total(self) -> int:
        """Steps of the whole training; 0 while unknown."""
        return self.progress.total if self.progress is not None else 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the last step at the pace of the last minute; nan while unknown."""
        if not self.total or len(self.pace) < 2 or self.pace[-1][1] <= self.pace[0][1]:
            return math.nan
        (began, first), (until, last) = self.pace[0], self.pace[-1]
        return max(0, self.total - self.step) * (until - began) / (last - first)

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
        del self.recent_events[: -self.kept_events]

    def _on_started(self, event: kinds.Started) -> None:
        self.job, self.hosts, self.started = one_line(event.job), [one_line(host) for host in event.hosts], event.time
        self.continues = one_line(event.checkpoint)
        if self.state == "submitted":
            self.state = "starting"
        for role in event.roles:
            self.rank_of(role.role, role.rank, role.host)

    def _on_progress(self, event: kinds.Progress) -> None:
        self.progress = event
        earlier = next((entry for entry in reversed(self.pace) if entry[0] < event.time), None)
        if earlier is not None and event.step > earlier[1]:
            self.rate = (event.step - earlier[1]) / (event.time - earlier[0])
        if not self.pace or event.step > self.pace[-1][1]:
            self.pace.append((event.time, event.step))
        while len(self.pace) > 2 and self.pace[1][0] < event.time - PACE:
            self.pace.popleft()
        self.metric = self.metric or watched_metric(event.metrics)
        value = event.metrics.get(self.metric)
        if value is not None:
            self.history.add(event.step, event.time, value)
        if event.examples_per_second or self.rate:
            self.throughput.add(event.step, event.time, event.examples_per_second or self.rate)

    def _on_lost(self, role: str, event: kinds.WorkerLost | kinds.ServerLost) -> None:
        found = self.rank_of(role, event.rank, event.host)
        found.state, found.last_error, found.rate = "lost", one_line(event.reason), 0.0
        self.note(event.time, ERROR, f"{found.name} on {found.host} was lost: {event.reason}")

    def _on_restored(self, event: kinds.Restored) -> None:
        self.history.cut(event.step)
        self.throughput.cut(event.step)
        self.progress, self.rate = None, 0.0
        self.pace.clear()
        for rank in self.ranks.values():
            rank.step, rank.step_time, rank.rate = event.step, math.nan, 0.0
        where = f"{event.checkpoint} (step {event.step:,})" if event.checkpoint else "its start values"
        again = f"; {event.lost:,} steps are repeated" if event.lost else ""
        self.note(event.time, INFO, f"continues from {where}{again}")

    def _on_state(self, event: kinds.StateChanged) -> None:
        if event.role == "job":
            self.state, self.recovering = event.state, None
            return
        found = self.rank_of(event.role, event.rank, event.host)
        if found.state != event.state:  # steps count from here on: steps before it ran were no training
            found.step, found.step_time = event.step, event.time
        found.joined = found.joined and event.state != "starting"
        found.prepared = event.state == "waiting" or (found.prepared and event.state != "starting")
        found.state, found.pid, found.staleness = event.state, event.pid or found.pid, event.staleness
        found.last_error = one_line(event.last_error) or ("" if event.state == "running" else found.last_error)
        found.cpu, found.memory, found.sync = event.cpu, event.memory, event.sync
        found.sends, found.receives = event.sends, event.receives
        found.gpu, found.gpu_memory = event.gpu, event.gpu_memory
        found.parts = event.parts
        if event.step > found.step and not math.isnan(found.step_time) and event.time > found.step_time:
            found.rate = (event.step - found.step) / (event.time - found.step_time)
        if event.step != found.step or math.isnan(found.step_time):
            found.step, found.step_time = event.step, event.time
        if found.state != "running":
            found.rate = 0.0
        if found.state == "failed":
            self.note(
                event.time, ERROR, f"{found.name} on {found.host} failed: {found.last_error or 'no reason given'}"
            )


def plan_check_text(event: kinds.PlanChecked) -> str:
    """Return what the first steps show about the plan as a sentence."""
    measured, predicted = format_seconds(event.measured), format_seconds(event.predicted)
    text = f"a step takes {measured} with {event.chosen}, where the plan predicts {predicted}"
    if event.fastest != event.chosen:
        text += f"; with {event.fastest} it would take {format_seconds(event.fastest_seconds)}"
        text += ", so the job changes to it at a checkpoint" if event.changes else ""
    return text


def last_printed(before: kinds.Log | None, event: kinds.Log) -> kinds.Log | None:
    """Return the line that says how far a script is: the last one of stdout, of worker/0 if that one prints."""
    if event.stream != "stdout" or not event.text.strip():
        return before
    return event if before is None or event.rank in (before.rank, "worker/0") else before


def watched_metric(metrics: Mapping[str, float]) -> str:
    """Return the metric to draw: `loss`, else the first whose name has loss in it, else the first; "" without any."""
    names = list(metrics)
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in metrics else (losses or names or [""])[0]
