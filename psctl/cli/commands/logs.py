"""psctl logs: what the processes of a job printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, Told, duration_ago, print_json

if TYPE_CHECKING:
    from psctl.launch.home import JobRecord
    from psctl.launch.jobs.job_logs import Line, Selector
    from psctl.view.console import Glyphs


def logs(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="digits-3, or digits for its newest; nothing: the newest.", autocompletion=completion.jobs),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what comes.")] = False,
    role: Annotated[
        str,
        typer.Option(
            "-r",
            "--role",
            metavar="ROLE[:RANKS]",
            help="worker:3, worker:0-3, server, worker,server:0.",
            autocompletion=completion.ranks,
        ),
    ] = "",
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Last lines only.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="5m", help="Lines of that time only.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="RE", help="Lines that match a regular expression.")
    ] = None,
) -> None:
    """Print what the processes of a job printed, from all its hosts.

    Without -f and --since the log files of the hosts are read, which hold the newest lines of each rank up to
    `logs: {max}` of the job file; with them the job's event log is, in the order of time.
    """
    from psctl.launch.jobs.job_logs import Selector

    own: Context = context.obj
    selector = Selector(role)
    record = own.home.job(job)
    if follow or since is not None:
        _from_events(own, record, selector, follow=follow, tail=tail, since=since, grep=grep)
    else:
        _from_files(own, record, selector, tail, grep)


def _from_files(own: Context, record: JobRecord, selector: Selector, tail: int | None, grep: str | None) -> None:
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.jobs.job_logs import check, collect, pattern_of
    from psctl.types import HostName

    if grep is not None:
        pattern_of(grep)
    with own.connect(own.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        head = fleet.shells.get(HostName(record.head.name))
        if head is not None:
            check(head, record, selector)
        lines, removed, missing = collect(record, fleet, selector, tail, grep)
    for gap in removed:
        own.warn(
            f"{gap.rank} on {gap.host}: the first {gap.lines:,} lines of {gap.stream} are not kept any more "
            "(logs: {max} in the job file)"
        )
    error = verdict(missing, len(record.hosts), "read")
    if error is not None and len(missing) == len(record.hosts):
        raise error
    _print(own, lines, error.document() if error else {})
    if error is not None:
        raise Told(error)


def _from_events(
    own: Context,
    record: JobRecord,
    selector: Selector,
    *,
    follow: bool,
    tail: int | None,
    since: str | None,
    grep: str | None,
) -> None:
    """Print the log events of a job: those that are there, and with `follow` those that come."""
    from psctl.clock import SystemClock
    from psctl.job.events import Log, RoleOf, Started, StateChanged
    from psctl.launch.jobs.event_stream import Follower
    from psctl.launch.jobs.job_logs import Line, check, pattern_of, tail_of

    after = duration_ago(since, "--since") if since is not None else 0.0
    pattern = pattern_of(grep) if grep is not None else None
    hosts: dict[str, str] = {}
    with own.connect(own.cluster_of(record), [record.head.name]) as fleet:
        for error in fleet.failed.values():
            raise error
        shell = next(iter(fleet.shells.values()))
        check(shell, record, selector)
        follower = Follower(record, lambda: shell, SystemClock(), own.warn, shell)
        held: list[Line] | None = []  # what was there already, until --tail has been applied to it
        one_document = follow and own.options.output == "json"  # printed whole, at the job's end
        for event in follower.events():
            if event is None:
                if held is not None and not one_document:
                    _print(own, tail_of(held, tail))
                    held = None
                if not follow:
                    return
            if isinstance(event, Started):
                hosts |= {f"{role.role}/{role.rank}": role.host for role in event.roles if isinstance(role, RoleOf)}
            if isinstance(event, StateChanged):
                hosts[f"{event.role}/{event.rank}"] = event.host
            if not isinstance(event, Log) or event.time < after or not selector.takes(event.rank):
                continue
            if pattern is not None and not pattern.search(event.text):
                continue
            line = Line(event.rank, hosts.get(event.rank, ""), event.stream, event.text)
            if held is None:
                _print(own, [line])
            else:
                held.append(line)
        if held is not None:
            _print(own, tail_of(held, tail))


def _print(own: Context, lines: Iterable[Line], more: Mapping[str, Any] | None = None) -> None:
    """Print lines: each behind its rank and host, or as JSON, with what `more` has to say."""
    from psctl.view.console import Glyphs

    lines = list(lines)
    if own.options.output == "json":
        print_json({"lines": [line._asdict() for line in lines], **(more or {})})
        return
    glyphs = None if own.options.machine else Glyphs(own.out)
    for line in lines:
        if glyphs is None:
            print_json({"event": "log", **line._asdict()})
        else:
            _print_line(own, line, glyphs)
    if more and glyphs is None:
        print_json(more)
    sys.stdout.flush()


def _print_line(own: Context, line: Line, glyphs: Glyphs) -> None:
    from psctl.view.console import rank_lines, say

    say(own.out, *rank_lines(line.rank, line.host, line.text, glyphs))


VERB = logs
