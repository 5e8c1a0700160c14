"""The numbers of an event as records (step, time, name, value), for programs that draw curves. Pure."""

from __future__ import annotations

import re

import msgspec

from psctl.job import events

LONGEST = 200
"""Characters of a name."""


class MetricRecord(msgspec.Struct, frozen=True):
    """One number: `time` is seconds since the epoch."""

    step: int
    time: float
    name: str
    value: float


def plain_name(name: str) -> str:
    """Return the name of a metric without characters that programs refuse or interpret."""
    return re.sub(r"[^\w ./-]", "_", name)[:LONGEST].strip() or "_"


def of_group(event: events.GroupReported) -> dict[str, float]:
    """Return the numbers of a group by names that begin with the group's; of its further processes with their rank."""
    prefix = event.group if event.rank == 0 else f"{event.group}/{event.rank}"
    return {f"{prefix}/{name}": value for name, value in event.metrics.items()}


class MetricRecords:
    """Makes records of events; remembers the last values, because the last event repeats them."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}

    def of(self, event: events.AnyEvent) -> list[MetricRecord]:
        """Return the numbers of an event; psctl's own have names that begin with `psctl/`."""
        match event:
            case events.Progress():
                own: dict[str, float] = {
                    "psctl/epoch": event.epoch,
                    "psctl/examples_per_second": event.examples_per_second,
                    "psctl/bytes_per_second": event.bytes_per_second,
                    "psctl/compute_seconds": event.compute_seconds,
                    "psctl/sync_seconds": event.sync_seconds,
                    "psctl/hidden_seconds": event.hidden_seconds,
                    "psctl/staleness": event.staleness,
                }
                return self._records(event.step, event.time, {**event.metrics, **own})
            case events.GroupReported():
                return self._records(event.step, event.time, of_group(event))
            case events.CheckpointWritten():
                return self._records(event.step, event.time, {"psctl/checkpoint_seconds": event.seconds})
            case events.Restored():
                self._last.clear()
            case events.Finished():
                last = {plain_name(name): value for name, value in event.metrics.items()}
                new = {name: value for name, value in last.items() if self._last.get(name, (0, None))[1] != value}
                return self._records(event.steps, event.time, new)
        return []

    def _records(self, step: int, time: float, values: dict[str, float]) -> list[MetricRecord]:
        made = [MetricRecord(step, time, plain_name(name), value) for name, value in values.items()]
        self._last.update({each.name: (each.step, each.value) for each in made})
        return made
