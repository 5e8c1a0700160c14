"""A followed job where nothing can be redrawn: one line an event, one line of progress every few seconds.

Lines of psctl begin with the time and the event's name and go on with name=value, so that grep and cut can read them;
lines of ranks begin with `role/rank host │`. Nothing is cut.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from rich.console import Console

from psctl.job import events as kinds
from psctl.units import format_bytes, format_seconds
from psctl.view.console import Glyphs, rank_lines, say
from psctl.view.folding import spans
from psctl.view.job_view import LiveState
from psctl.view.text import clock_time, number, one_line

INTERVAL = 5.0
"""Seconds of the run between two lines of progress."""

_TOLD = {"failed", "lost"}


class PlainLog:
    """Prints a job line by line. Used like a LiveScreen.

    Args:
        console: of stderr.
        hint: ignored: there is no key to press.
        interval: seconds of the run between two lines of progress.
    """

    def __init__(self, console: Console, hint: str = "", interval: float = INTERVAL) -> None:
        self.state = LiveState()
        self._console = console
        self._interval = interval
        self._glyphs = Glyphs(console)
        self._printed = -math.inf  # time of the last line of progress
        self._kept: kinds.Progress | None = None  # newest progress, not printed yet
        self._job_state = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()

    def event(self, event: kinds.AnyEvent) -> None:
        """Take in one event and print what is to be said of it."""
        self.state.apply(event)
        match event:
            case kinds.Log():
                self._rank_lines(event)
            case kinds.Progress():
                self._kept = event
                if event.time >= self._printed + self._interval:
                    self._flush()
            case kinds.StateChanged():
                self._state(event)
            case kinds.Finished():
                self._flush()
            case _:
                self._say(event.time, describe(event))

    def hint(self, text: str) -> None:
        """Print what the next key does."""
        say(self._console, text)

    def _rank_lines(self, event: kinds.Log) -> None:
        host = self.state.host_of(event.rank)
        say(self._console, *rank_lines(event.rank, host, event.text, self._glyphs))

    def _flush(self) -> None:
        if self._kept is not None:
            self._printed = self._kept.time
            self._say(self._kept.time, describe(self._kept))
            self._kept = None

    def _state(self, event: kinds.StateChanged) -> None:
        if event.role == "job":
            if event.state != self._job_state:
                self._say(event.time, f"state {event.state}")
            self._job_state = event.state
        elif event.state in _TOLD:
            self._say(event.time, f"{event.state} {event.role}/{event.rank} {event.host}: {one_line(event.last_error)}")

    def _say(self, time: float, text: str) -> None:
        say(self._console, f"{clock_time(time)} {text}")


def describe(event: kinds.AnyEvent) -> str:
    """Return an event as one plain line: its name, then name=value or words."""
    match event:
        case kinds.Started():
            roles = spans([f"{role.role}/{role.rank}" for role in event.roles])
            text = f"started {event.job}: {roles} on {', '.join(event.hosts)}"
        case kinds.Planned():
            text = f"plan strategy={event.chosen} decided={str(event.decided).lower()}: {event.reason}"
            text += f"; gradients are summed {event.sums}" if event.sums else ""
        case kinds.Progress():
            metrics = " ".join(f"{name}={number(value)}" for name, value in event.metrics.items())
            text = (
                f"progress step={event.step} epoch={event.epoch} {metrics}"
                f" examples_per_second={event.examples_per_second:.0f}"
                f" compute={_joined(event.compute_seconds)} sync={_joined(event.sync_seconds)}"
                f" hidden={_joined(event.hidden_seconds)}"
            )
        case kinds.CheckpointWritten():
            size = format_bytes(event.bytes).replace(" ", "")
            text = f"checkpoint step={event.step} size={size} seconds={event.seconds:.3g} path={event.path}"
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
        case kinds.Notice():
            text = f"notice {event.text}"
        case kinds.StateChanged():
            text = f"state {event.role}/{event.rank} {event.host} {event.state}"
        case kinds.Log():
            text = f"log {event.rank} {event.text}"
        case kinds.Finished():
            text = f"finished status={event.status} steps={event.steps} seconds={event.seconds:.1f}"
    return one_line(text)


def _joined(seconds: float) -> str:
    return format_seconds(seconds).replace(" ", "")
