"""The end of a job for people: the box of a failed job, the lines of a done or stopped one; and any error."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from psctl import errors
from psctl.coordinator.state.stalls import OTHER_THREAD
from psctl.grouping import grouped
from psctl.job.events import CheckpointWritten, Finished, Log
from psctl.types import Document
from psctl.units import format_bytes, format_seconds
from psctl.view.console import Glyphs, say
from psctl.view.rank_rows import rank_ranges
from psctl.view.text import number, one_line, sanitize

OTHERS = 4
"""Most reasons of further failed ranks in the box; -o json has all."""

TAIL = 12
"""Most lines of a process's standard error in the box."""


class UncountedSteps(NamedTuple):
    """Describes a job whose script never called `prepare`, so that its steps were not counted.

    `printed` is the last line of its output, if any.
    """

    printed: Log | None = None


def draw_end(
    console: Console,
    job: str,
    finished: Finished,
    checkpoint: CheckpointWritten | None = None,
    logs: str = "",
    uncounted: UncountedSteps | None = None,
    summary: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the end of a job; the most important line is the last.

    Args:
        console: of stderr.
        finished: the job's last event.
        checkpoint: the last one written, if any.
        logs: the folder that holds the log files here; "" when they are on the hosts.
        uncounted: given when psctl did not count the job's steps.
        summary: (label, text) of further lines for a job that did not fail.
    """
    if finished.status == "failed":
        _draw_failure(console, job, finished, checkpoint, logs)
    else:
        say(console, *_calm_end(console, job, finished, checkpoint, logs, uncounted, summary))


def _calm_end(
    console: Console,
    job: str,
    finished: Finished,
    checkpoint: CheckpointWritten | None,
    logs: str,
    uncounted: UncountedSteps | None,
    summary: Sequence[tuple[str, str]],
) -> Iterator[Text]:
    glyphs = Glyphs(console)
    done = finished.status == "done"
    yield from (_field(label, one_line(text)) for label, text in summary)
    yield _field("logs", f"psctl logs {job}" + (f"   in {logs}" if logs else ""))
    if checkpoint is not None:
        written = f"{job}@{checkpoint.step} ({format_bytes(checkpoint.bytes)})"
        yield _field("last checkpoint", written + (f" in {one_line(checkpoint.path)}" if checkpoint.path else ""))
        if not done:
            yield _field("continue", f"psctl checkpoint restore {job}@{checkpoint.step}")
    elif not done:
        yield _field("last checkpoint", "none was written")
    sign, style = (glyphs.done, "bold green") if done else (glyphs.stopped, "bold yellow")
    outcome, took = f"{sign} {job} {'done' if done else 'stopped'}", f" in {format_seconds(finished.seconds)}"
    if uncounted is None:
        line = Text.assemble((f"{outcome}: ", style), f"{finished.steps:,} steps{took}")
    else:
        line = Text.assemble((outcome, style), took)
        if uncounted.printed is not None:
            line.append(f"; {one_line(uncounted.printed.rank)} printed last: {one_line(uncounted.printed.text)}")
    for name, value in finished.metrics.items():
        line.append(f", {one_line(name)} {number(value)}")
    yield line


def _field(label: str, text: str) -> Text:
    return Text.assemble("  ", (f"{label + ':':<17}", "dim"), text)


def _draw_failure(
    console: Console, job: str, finished: Finished, checkpoint: CheckpointWritten | None, logs: str
) -> None:
    lines = list(failure_lines(Glyphs(console), job, finished, checkpoint, logs))
    if console.is_terminal:
        parts = [_hanging(line) for line in lines]
        console.print(Panel(Group(*parts), box=box.HORIZONTALS, border_style="red", padding=0, expand=True))
    else:
        say(console, *lines)


def _hanging(line: Text) -> Padding:
    """Return a line whose continuation is indented like its start."""
    count = len(line.plain) - len(line.plain.lstrip(" "))
    rest = line[count:] if count else line
    rest.overflow = "fold"
    return Padding(rest, (0, 0, 0, count))


def failure_lines(
    glyphs: Glyphs, job: str, finished: Finished, checkpoint: CheckpointWritten | None, logs: str
) -> Iterator[Text]:
    """Yield the lines of the box: the failed rank, its error, the ranks stopped with it, the checkpoint, the remedy."""
    failure: Document = finished.failure or {}
    step = int(failure.get("step") or finished.steps or 0)
    where = f" at step {step:,}" if step else ""
    after = f" after {format_seconds(finished.seconds)}" if finished.seconds else ""
    yield Text.assemble((f"{glyphs.failed} {job} failed{where}{after}", "bold red"), failed_rank_text(failure))
    yield Text(f"  {one_line(failure.get('exception') or 'no reason is known')}", style="bold")
    frames = _texts(failure.get("frames"))
    for frame in frames:
        yield Text(f"    {one_line(frame)}")
    if not frames:
        tail = [line for text in _texts(failure.get("tail")) for line in sanitize(text).splitlines()]
        for line in tail[-TAIL:]:
            yield Text.assemble(f"    {glyphs.bar} ", (line.rstrip(), "dim"))
    yield from (_field(rank, f"is at {line}") for rank, line in _elsewhere(failure))
    if failure.get("hint"):
        yield _field("what to do", one_line(failure["hint"]))
    yield from (_field("failed too", line) for line in _others(failure))
    stopped = _texts(failure.get("stopped"))
    if stopped:
        yield _field("stopped with it", rank_ranges([one_line(name) for name in stopped]))
    saved = failure.get("checkpoint") or (f"{job}@{checkpoint.step}" if checkpoint else None)
    yield _field("last checkpoint", f"{one_line(saved)} (verified)" if saved else "none was written")
    if logs:
        yield _field("log files", logs)
    yield _field("log", one_line(failure.get("log") or f"psctl logs {job}"))
    resume = failure.get("resume") or (f"psctl checkpoint restore {saved}" if saved else None)
    if resume:
        yield _field("resume", one_line(resume))


def _elsewhere(failure: Document) -> list[tuple[str, str]]:
    """Return the positions of other ranks' main threads, for a stalled job."""
    mine = f"{failure.get('role')}/{failure.get('rank')}"
    found = []
    for rank, frames in (failure.get("stacks") or {}).items():
        main = [line for line in _texts(frames) if not line.startswith(OTHER_THREAD)]
        if rank != mine and main:
            found.append((one_line(rank), one_line(main[-1])))
    return found[:OTHERS]


def _others(failure: Document) -> list[str]:
    """Return a line for each reason for which further ranks failed."""
    failed = failure.get("failed") or []
    by_reason = grouped((one_line(other["exception"]), one_line(other["rank"])) for other in failed)
    lines = [f"{rank_ranges(ranks)}: {reason}" for reason, ranks in by_reason.items()]
    more = len(lines) - OTHERS
    return lines if more <= 0 else [*lines[:OTHERS], f"... and {more} more"]


def failed_rank_text(failure: Document) -> str:
    """Return ": worker/3 on node-b exited with 1", or "" when the rank is unknown."""
    if not failure.get("role"):
        return ""
    text = f": {one_line(failure['role'])}/{failure.get('rank', 0)}"
    if failure.get("host"):
        text += f" on {one_line(failure['host'])}"
    status = failure.get("status")
    if isinstance(status, int) and status < 0:
        return f"{text} was ended by {signal_name(-status)}"
    return f"{text} exited with {status}" if status else text


def signal_name(number: int) -> str:
    """Return SIGKILL for 9."""
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(entry) for entry in value] if isinstance(value, list | tuple) else []


def draw_error(console: Console, error: errors.PsctlError) -> None:
    """Print an error: one line with the problem, one with what to do; then further errors that were found with it."""
    where = one_line(error.where)
    message = one_line(error.message)
    known = f"{where}: " if where and where not in message else ""
    say(console, Text.assemble(("error: ", "bold red"), f"{known}{message}"))
    if error.hint:
        say(console, Text.assemble(("  hint: ", "dim"), one_line(error.hint)))
    for other in error.others:
        draw_error(console, other)
