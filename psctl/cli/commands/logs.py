"""psctl logs: print the output of a job's processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, ReportedError, head_of, print_json
from psctl.cli.shared.parameters import JobArgument
from psctl.errors import UsageError
from psctl.types import Document

if TYPE_CHECKING:
    from psctl.launch.home import JobRecord
    from psctl.launch.jobs.job_logs import LogLine, RankSelector
    from psctl.remote.shell import Shell


def logs(
    context: typer.Context,
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines.")] = False,
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
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="5m", help="Only lines of this time.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="RE", help="Only lines that match a regular expression.")
    ] = None,
) -> None:
    """Print the output of a job's processes on all its hosts.

    Without -f and --since it reads the log files of the hosts, which hold the newest lines of each rank up to
    `logs: {max}` of the job file; with them it reads the job's event log, in the order of time.

    \b
    Examples:
      psctl logs digits -f
      psctl logs digits-3 -r worker:0-3 --tail 20
      psctl logs digits --since 5m --grep "loss|error"
    """
    from psctl.launch.jobs.job_logs import RankSelector

    own = Context.of(context)
    selector = RankSelector(role)
    record = own.home.job(job)
    if follow or since is not None:
        _from_events(own, record, selector, follow=follow, tail=tail, since=since, grep=grep)
    else:
        _from_files(own, record, selector, tail, grep)


def _from_files(own: Context, record: JobRecord, selector: RankSelector, tail: int | None, grep: str | None) -> None:
    from psctl.launch import leader_search
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.jobs.job_logs import check, pattern_of, read_logs
    from psctl.types import HostName

    if grep is not None:
        pattern_of(grep)
    with own.connect(own.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        record = leader_search.on_fleet(fleet, record)
        head = fleet.shells.get(HostName(record.head.name))
        if head is not None:
            check(head, record, selector)
        lines, removed, missing = read_logs(record, fleet, selector, tail, grep)
    for gap in removed:
        own.warn(
            f"{gap.rank} on {gap.host}: the first {gap.lines:,} lines of {gap.stream} were removed "
            "(logs: {max} in the job file)"
        )
    error = verdict(missing, len(record.hosts), "read")
    if error is not None and len(missing) == len(record.hosts):
        raise error
    _print(own, lines, error.document() if error else {})
    if error is not None:
        raise ReportedError(error)


def _from_events(
    own: Context,
    record: JobRecord,
    selector: RankSelector,
    *,
    follow: bool,
    tail: int | None,
    since: str | None,
    grep: str | None,
) -> None:
    """Print the log events of a job; with `follow`, new ones too until its end."""
    from psctl.clock import SystemClock
    from psctl.job.events import Log, RoleOf, Started, StateChanged
    from psctl.launch import leader_search
    from psctl.launch.jobs.event_stream import EventReader
    from psctl.launch.jobs.job_logs import LogLine, check, pattern_of

    after = _moment_of(since) if since is not None else 0.0
    pattern = pattern_of(grep) if grep is not None else None

    def takes(event: Log) -> bool:
        return selector.takes(event.rank) and (pattern is None or pattern.search(event.text) is not None)

    hosts: dict[str, str] = {}
    with contextlib.ExitStack() as open_fleets:
        fleet, record = open_fleets.enter_context(own.head_fleet(record))
        shell = head_of(fleet, record)
        check(shell, record, selector)

        def find_leader() -> JobRecord:
            nonlocal record
            record = leader_search.find(own.home, record, own.connect)
            return record

        def connect() -> Shell:
            return head_of(open_fleets.enter_context(own.connect(own.cluster_of(record), [record.head.name])), record)

        recorded, one_document = partial(own.home.job, record.job), own.options.output == "json"
        follower = EventReader(record, connect, SystemClock(), own.warn, recorded, shell, find_leader)
        # lines of the past that are held back: for one document, or because only the last ones are printed
        held: deque[LogLine] | None = deque(maxlen=tail) if one_document or tail is not None else None
        follower.measure_past()
        for event in follower.events():
            if isinstance(event, Started):
                hosts |= {f"{role.role}/{role.rank}": role.host for role in event.roles if isinstance(role, RoleOf)}
            if isinstance(event, StateChanged):
                hosts[f"{event.role}/{event.rank}"] = event.host
            if isinstance(event, Log) and event.time >= after and takes(event):
                line = LogLine(event.rank, hosts.get(event.rank, ""), event.stream, event.text)
                if held is None:
                    _print(own, [line])
                else:
                    held.append(line)
            if follower.past_is_read and not follow:
                break
            if follower.past_is_read and held is not None and not one_document:
                _print(own, held)
                held = None
        if held is not None:
            _print(own, held)


def _print(own: Context, lines: Iterable[LogLine], more: Document | None = None) -> None:
    """Print lines, each after its rank and host, or as JSON with the keys of `more`."""
    from psctl.view.console import Glyphs, rank_lines, say

    lines = list(lines)
    if own.options.output == "json":
        print_json({"lines": [line._asdict() for line in lines], **(more or {})})
        return
    glyphs = None if own.options.machine else Glyphs(own.out)
    for line in lines:
        if glyphs is None:
            print_json({"event": "log", **line._asdict()})
        else:
            say(own.out, *rank_lines(line.rank, line.host, line.text, glyphs))
    if more and glyphs is None:
        print_json(more)
    sys.stdout.flush()


def _moment_of(since: str) -> float:
    """Return the moment that --since means, in seconds since the epoch. Raises UsageError when it is no duration."""
    from psctl.units import parse_duration

    try:
        return time.time() - parse_duration(since)
    except ValueError as error:
        raise UsageError(f"--since {error}", hint="such as --since 5m") from None
