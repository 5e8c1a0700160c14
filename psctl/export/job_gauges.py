"""The present numbers of a job, from its events: what a page for Prometheus shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from psctl.export.metric_records import of_group, plain_name
from psctl.job import events

MOST_NAMES = 1000
"""Metrics of a script that are kept."""

LIVE = ("starting", "running", "waiting")


class Sample(msgspec.Struct, frozen=True):
    """One value, with its labels in the order of its gauge's."""

    labels: tuple[str, ...]
    value: float


class Gauge(msgspec.Struct, frozen=True):
    """One quantity. `counts`: it only grows."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]
    counts: bool = False


class JobGauges:
    """What is known of a job; `apply` adds an event. Calls must not overlap."""

    def __init__(self) -> None:
        self._progress: events.Progress | None = None
        self._metrics: dict[str, float] = {}
        self._ranks: dict[tuple[str, int], events.StateChanged] = {}
        self._state = "starting"
        self._checkpoint: events.CheckpointWritten | None = None
        self._losses: Counter[str] = Counter({"worker": 0, "server": 0})
        self._restarts = 0
        self._replicas: int | None = None

    def apply(self, event: events.AnyEvent) -> None:
        """Add an event."""
        match event:
            case events.Progress():
                self._progress = event
                self._update(event.metrics)
            case events.GroupReported():
                self._update(of_group(event))
            case events.StateChanged() if event.role == "job":
                self._state = event.state
            case events.StateChanged():
                self._ranks[event.role, event.rank] = event
            case events.CheckpointWritten():
                self._checkpoint = event
            case events.WorkerLost():
                self._losses["worker"] += 1
            case events.ServerLost():
                self._losses["server"] += 1
            case events.ReplicasChanged():
                self._replicas = event.replicas
            case events.Restored():
                self._restarts += 1
            case events.Finished():
                self._state = event.status

    def _update(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update({plain_name(name): value for name, value in metrics.items()})
        while len(self._metrics) > MOST_NAMES:
            del self._metrics[next(iter(self._metrics))]

    def gauges(self, now: float) -> list[Gauge]:
        """Return all quantities that are known.

        Args:
            now: seconds since the epoch.
        """
        found = [
            Gauge("psctl_job_state", "1 for the state that the job is in.", ("state",), (Sample((self._state,), 1.0),)),
            Gauge("psctl_losses", "Workers and servers that were lost.", ("role",),
                  tuple(Sample((role,), count) for role, count in self._losses.items()), counts=True),
            Gauge("psctl_restarts", "Times that training resumed from a checkpoint.", (),
                  (Sample((), self._restarts),), counts=True),
        ]  # fmt: skip
        if self._replicas is not None:
            text = "Further copies of the shard that has the fewest: servers that may be lost at once."
            found.append(Gauge("psctl_replicas", text, (), (Sample((), self._replicas),)))
        return [*found, *self._of_progress(), *self._of_ranks(), *self._of_checkpoint(now)]

    def _of_progress(self) -> list[Gauge]:
        event = self._progress
        if event is None:
            return []
        single: list[tuple[str, str, float]] = [
            ("psctl_step", "Steps that are done.", event.step),
            ("psctl_epoch", "Epoch of the script.", event.epoch),
            ("psctl_total_steps", "Steps of the whole training; 0: unknown.", event.total),
            ("psctl_examples_per_second", "Examples per second of all workers.", event.examples_per_second),
            ("psctl_bytes_per_second", "Bytes per second that synchronization sends.", event.bytes_per_second),
            ("psctl_compute_seconds", "Seconds of a step in computation.", event.compute_seconds),
            ("psctl_sync_seconds", "Seconds of a step in which a worker waits for synchronization.",
             event.sync_seconds),
            ("psctl_hidden_seconds", "Seconds of a step in which computation hides synchronization.",
             event.hidden_seconds),
            ("psctl_staleness", "Clocks that are missing from the values of the last step.", event.staleness),
            ("psctl_progress_time_seconds", "Time of the last progress, since the epoch.", event.time),
        ]  # fmt: skip
        gauges = [Gauge(name, text, (), (Sample((), value),)) for name, text, value in single]
        values = tuple(Sample((name,), value) for name, value in self._metrics.items())
        return [*gauges, Gauge("psctl_metric", "Numbers that the script reports.", ("name",), values)]

    def _of_ranks(self) -> list[Gauge]:
        ranks = list(self._ranks.values())
        states = Counter((each.role, plain_name(each.state)) for each in ranks)
        counted = tuple(Sample(labels, count) for labels, count in sorted(states.items()))
        gauges = [Gauge("psctl_processes", "Processes of the job by state.", ("role", "state"), counted)]
        values = {
            "step": ("Step of a process.", 1),
            "cpu": ("Processor time that a process uses, 1: one core.", 100),
            "memory": ("Bytes of memory that a process holds.", 1),
            "sync": ("Share of its time that a worker waits for synchronization.", 100),
            "staleness": ("Clocks that are missing from the values of a worker's last step.", 1),
            "sends": ("Bytes per second that a worker sends to other processes.", 1),
            "receives": ("Bytes per second that a worker receives from other processes.", 1),
            "gpu": ("Share of the time that the GPUs of a process are busy.", 100),
            "gpu_memory": ("Bytes of GPUs that a process holds.", 1),
        }
        names = {
            "cpu": "psctl_rank_cpu_cores", "memory": "psctl_rank_memory_bytes", "sync": "psctl_rank_sync_ratio",
            "sends": "psctl_rank_sent_bytes_per_second", "receives": "psctl_rank_received_bytes_per_second",
            "gpu": "psctl_rank_gpu_ratio", "gpu_memory": "psctl_rank_gpu_memory_bytes",
        }  # fmt: skip
        of_workers = ("sync", "staleness", "sends", "receives")
        for key, (text, scale) in values.items():
            samples = tuple(
                Sample((each.role, str(each.rank), plain_name(each.host)), getattr(each, key) / scale)
                for each in ranks
                if each.state in LIVE
                and each.role in (("worker",) if key in of_workers else ("worker", "server", "reader"))
                and (each.gpu_memory or not key.startswith("gpu"))
            )
            gauges.append(Gauge(names.get(key, f"psctl_rank_{key}"), text, ("role", "rank", "host"), samples))
        return gauges

    def _of_checkpoint(self, now: float) -> list[Gauge]:
        event = self._checkpoint
        if event is None:
            return []
        age = max(0.0, now - event.time)
        return [
            Gauge("psctl_checkpoint_step", "Step of the newest checkpoint.", (), (Sample((), event.step),)),
            Gauge("psctl_checkpoint_age_seconds", "Age of the newest checkpoint.", (), (Sample((), age),)),
        ]
