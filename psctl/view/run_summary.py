"""The summary of a run from its events: throughput, the time split of a step, the best checkpoint, the losses survived.

Pure. Rates in progress events are means over an interval, so they are weighted by its length; seconds a step by its
steps. The best checkpoint is known where a progress event of its step has the watched metric.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from psctl.job import events as kinds
from psctl.units import format_count, format_rate, format_seconds
from psctl.view.job_view import watched_metric
from psctl.view.text import number

KEPT_STEPS = 512
"""Newest steps whose watched metric is kept until the checkpoint of such a step is written."""


@dataclass
class RunSummary:
    """What the events of a run amount to; `apply` adds one event."""

    examples: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0  # in which they were processed
    compute: float = 0.0
    sync: float = 0.0
    hidden: float = 0.0
    steps: int = 0
    checkpoints: int = 0
    metric: str = ""
    best: tuple[int, float] | None = None  # step and value of the best checkpoint
    lost: Counter[str] = field(default_factory=Counter)  # by role
    restarts: int = 0
    repeated: int = 0
    """Steps that were done again."""
    _workers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: sum and number of samples of its processor use, in percent of a core."""
    _hosts: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """By name: sums of bytes/s sent and received, and their number."""
    _before: tuple[float, int] | None = None  # time and step of the last progress
    _values: dict[int, float] = field(default_factory=dict)

    def apply(self, event: kinds.AnyEvent) -> None:
        """Add an event."""
        match event:
            case kinds.Progress():
                self._on_progress(event)
            case kinds.CheckpointWritten():
                self._on_checkpoint(event)
            case kinds.StateChanged() if event.role == "worker" and event.memory:
                total, count = self._workers.get(event.rank, (0, 0))
                self._workers[event.rank] = total + event.cpu, count + 1
            case kinds.HostTraffic():
                sent, received, number_of = self._hosts.get(event.host, (0.0, 0.0, 0))
                self._hosts[event.host] = sent + event.sent, received + event.received, number_of + 1
            case kinds.WorkerLost():
                self.lost["worker"] += 1
            case kinds.ServerLost():
                self.lost["server"] += 1
            case kinds.Restored():
                self._before = None
                if self.lost:
                    self.restarts += 1
                    self.repeated += event.lost
                    if self.best is not None and self.best[0] > event.step:
                        self.best = None

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, text) of all that is known, in the order in which it is read."""
        found = []
        if self.seconds > 0 and self.steps:
            parts = [f"{format_count(self.examples / self.seconds)} examples/s"] if self.examples else []
            parts.append(f"{format_count(self.steps / self.seconds)} steps/s")
            if self.bytes:
                parts.append(f"{format_rate(self.bytes / self.seconds)} moved")
            found.append(("throughput", ", ".join(parts)))
            found.append(("a step", self._step_text()))
        elif not self.steps:
            found += self._usage_lines()
        if self.checkpoints:
            text = f"{self.checkpoints:,} written"
            if self.best is not None:
                text += f", best at step {self.best[0]:,} ({self.metric} {number(self.best[1])})"
            found.append(("checkpoints", text))
        if self.lost:
            found.append(("survived", self._survived_text()))
        return found

    def _usage_lines(self) -> list[tuple[str, str]]:
        """Return what is known of a run whose steps are not counted."""
        found = []
        if self._workers:
            means = [total / count for total, count in self._workers.values()]
            found.append(("processors", f"{sum(means) / len(means) / 100:.1f} cores a worker"))
        if self._hosts:
            sent, received = (max(sums[which] / sums[2] for sums in self._hosts.values()) for which in (0, 1))
            found.append(("network", f"a host sent {format_rate(sent)} and received {format_rate(received)} at most"))
        return found

    def _step_text(self) -> str:
        compute, sync, hidden = (each / self.steps for each in (self.compute, self.sync, self.hidden))
        share = sync / (compute + sync) if compute + sync > 0 else 0.0
        text = f"compute {format_seconds(compute)}, sync {format_seconds(sync)} ({100 * share:.0f}%)"
        return text + (f" and {format_seconds(hidden)} hidden" if hidden > 0 else "")

    def _survived_text(self) -> str:
        counts = [f"{count:,} lost {role}{'s' if count > 1 else ''}" for role, count in sorted(self.lost.items())]
        text = ", ".join(counts)
        if not self.restarts:
            return f"{text}; no step was repeated"
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        return f"{text}; started again {times}, {self.repeated:,} steps repeated"

    def _on_progress(self, event: kinds.Progress) -> None:
        before, self._before = self._before, (event.time, event.step)
        self.metric = self.metric or watched_metric(event.metrics)
        value = event.metrics.get(self.metric)
        if value is not None and math.isfinite(value):
            self._values[event.step] = value
            if len(self._values) > KEPT_STEPS:
                del self._values[next(iter(self._values))]
        if before is None or event.step <= before[1] or event.time < before[0]:
            return  # several events of one time have steps of one interval
        seconds, steps = event.time - before[0], event.step - before[1]
        self.seconds, self.steps = self.seconds + seconds, self.steps + steps
        self.examples += event.examples_per_second * seconds
        self.bytes += event.bytes_per_second * seconds
        self.compute += event.compute_seconds * steps
        self.sync += event.sync_seconds * steps
        self.hidden += event.hidden_seconds * steps

    def _on_checkpoint(self, event: kinds.CheckpointWritten) -> None:
        self.checkpoints += 1
        value = self._values.get(event.step)
        if value is None or "loss" not in self.metric.lower():
            return  # whether more is better is not known of another metric
        if self.best is None or value < self.best[1]:
            self.best = event.step, value
