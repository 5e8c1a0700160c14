"""A followed job as plain lines, for pipes and files: a line an event, a line of progress every few seconds.

Lines of psctl begin with the time and the event's name, followed by name=value, so that grep and cut can read them;
lines of ranks begin with `role/rank host │`. Nothing is truncated.
"""

from __future__ import annotations

import math
from typing import Self, assert_never

from rich.console import Console

from psctl.job import events as kinds
from psctl.units import format_bytes, format_seconds
from psctl.view.console import Glyphs, rank_lines, say
from psctl.view.job_view import JobView
from psctl.view.rank_rows import rank_ranges
from psctl.view.text import clock_time, number, one_line

INTERVAL = 5.0
"""Seconds of the run between two lines of progress."""

_PRINTED_STATES = {"failed", "lost"}


class PlainLog:
    """Prints a job line by line; it has the methods of LiveScreen.

    Args:
        console: of stderr.
        hint: ignored.
        interval: seconds of the run between two lines of progress.
    """

    def __init__(self, console: Console, hint: str = "", interval: float = INTERVAL) -> None:
        self.state = JobView()
        self._console = console
        self._interval = interval
        self._glyphs = Glyphs(console)
        self._printed = -math.inf  # time of the last line of progress
        self._pending: kinds.Progress | None = None  # the newest progress, while not printed
        self._job_state = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._print_progress()

    def on_event(self, event: kinds.AnyEvent) -> None:
        """Apply an event and print its line, if any."""
        self.state.apply(event)
        match event:
            case kinds.Log():
                host = self.state.host_of(event.rank)
                say(self._console, *rank_lines(event.rank, host, event.text, self._glyphs))
            case kinds.Progress():
                self._pending = event
                if event.time >= self._printed + self._interval:
                    self._print_progress()
            case kinds.StateChanged():
                self._print_state(event)
            case kinds.HostTraffic() | kinds.HostFlows() | kinds.HostGpus() | kinds.LastSteps():
                pass
            case kinds.ReplicasChanged():
                pass  # a notice says it
            case kinds.Finished():
                self._print_progress()
            case _:
                self._print(event.time, describe(event))

    def set_hint(self, text: str) -> None:
        """Print the effect of the next Ctrl-C."""
        say(self._console, text)

    def _print_progress(self) -> None:
        if self._pending is not None:
            self._printed = self._pending.time
            self._print(self._pending.time, describe(self._pending))
            self._pending = None

    def _print_state(self, event: kinds.StateChanged) -> None:
        if event.role == "job":
            if event.state != self._job_state:
                self._print(event.time, f"state {event.state}")
            self._job_state = event.state
        elif event.state in _PRINTED_STATES:
            self._print(
                event.time, f"{event.state} {event.role}/{event.rank} {event.host}: {one_line(event.last_error)}"
            )

    def _print(self, time: float, text: str) -> None:
        say(self._console, f"{clock_time(time)} {text}")


def describe(event: kinds.AnyEvent) -> str:  # long: a line for each kind of event
    """Return an event as one plain line: its name, then name=value or text."""
    match event:
        case kinds.Started():
            roles = rank_ranges([f"{role.role}/{role.rank}" for role in event.roles])
            text = f"started {event.job}: {roles} on {', '.join(event.hosts)}"
        case kinds.Planned():
            text = f"plan strategy={event.chosen} decided={str(event.decided).lower()}: {event.reason}"
            text += f"; gradients are summed {event.sums}" if event.sums else ""
        case kinds.Progress():
            metrics = " ".join(f"{name}={number(value)}" for name, value in event.metrics.items())
            text = (
                f"progress step={event.step}{f'/{event.total}' if event.total else ''} epoch={event.epoch} {metrics}"
                f" examples_per_second={event.examples_per_second:.0f}"
                f" compute={_seconds(event.compute_seconds)} sync={_seconds(event.sync_seconds)}"
                f" hidden={_seconds(event.hidden_seconds)}"
            )
        case kinds.CheckpointWritten():
            size = format_bytes(event.bytes).replace(" ", "")
            text = f"checkpoint step={event.step} size={size} seconds={event.seconds:.3g} path={event.path}"
            if 0 < event.written < event.bytes:
                text += f" written={format_bytes(event.written).replace(' ', '')}"
        case kinds.CheckpointCopied():
            text = f"checkpoint-copied step={event.step} place={event.place}"
        case kinds.PlanChecked():
            text = (
                f"plan-check strategy={event.chosen} step={_seconds(event.measured)}"
                f" predicted={_seconds(event.predicted)} compute={_seconds(event.compute)}"
            )
            if event.fastest != event.chosen:
                text += f" faster={event.fastest}:{_seconds(event.fastest_seconds)}"
            text += " changes=yes" if event.changes else ""
        case kinds.BucketChosen():
            tried = " ".join(f"{_size(each.size)}:{_seconds(each.seconds)}" for each in event.measured)
            text = f"bucket size={_size(event.size)} measured={tried or '-'}"
        case kinds.StepsInBackward():
            tried = " ".join(f"{each.buckets}:{_seconds(each.seconds)}" for each in event.measured)
            text = f"steps-in-backward buckets={event.buckets}/{event.all} measured={tried or '-'}"
        case kinds.GroupReported():
            metrics = " ".join(f"{name}={number(value)}" for name, value in event.metrics.items())
            text = f"group {event.group}/{event.rank} step={event.step} {metrics}"
        case kinds.WorkerLost():
            text = f"worker-lost worker/{event.rank} {event.host}: {event.reason}"
            text += f" (lost: {event.lost})" if event.lost else ""
        case kinds.ServerLost():
            text = f"server-lost server/{event.rank} {event.host}: {event.reason}"
        case kinds.WorkerJoined():
            text = f"worker-joined worker/{event.rank} {event.host}"
        case kinds.Restored():
            lost = f" lost={event.lost}" if event.lost else ""
            text = f"restored checkpoint={event.checkpoint or 'none'} step={event.step}{lost}"
        case kinds.Recovering():
            text = f"recovering waiting for {', '.join(event.hosts)}, {event.until - event.since:.0f} s at most"
        case kinds.Recovered():
            text = "recovered"
        case kinds.Notice():
            text = f"notice {event.text}"
        case kinds.StateChanged():
            text = f"state {event.role}/{event.rank} {event.host} {event.state}"
        case kinds.HostTraffic():
            text = f"traffic {event.host} sent={event.sent:.3g} received={event.received:.3g}"
        case kinds.HostFlows():
            text = "flows " + " ".join(f"{each.source}->{each.target}={each.rate:.3g}" for each in event.flows)
        case kinds.HostGpus():
            busy = ("-" if each.busy is None else f"{each.busy}%" for each in event.gpus)
            text = f"gpus {event.host} {' '.join(busy)}"
        case kinds.ReplicasChanged():
            text = f"replicas {event.replicas}"
        case kinds.LastSteps():
            text = f"steps worker/{event.rank} {event.host} spans={len(event.spans)}"
        case kinds.Log():
            text = f"log {event.rank} {event.text}"
        case kinds.Finished():
            text = f"finished status={event.status} steps={event.steps} seconds={event.seconds:.1f}"
        case _:
            assert_never(event)
    return one_line(text)


def _size(count: int) -> str:
    return format_bytes(count).replace(" ", "")


def _seconds(seconds: float) -> str:
    return format_seconds(seconds).replace(" ", "")
