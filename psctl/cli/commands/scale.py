"""psctl scale: change the number of processes of a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def scale(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(help="A running job; without it the newest.", autocompletion=completion.jobs)
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", min=1, help="Number of workers.")] = None,
    servers: Annotated[int | None, typer.Option("--servers", metavar="M", min=1, help="Number of servers.")] = None,
) -> None:
    """Change the numbers of workers and servers of a job under ps.

    \b
    Examples:
      psctl scale digits --workers 6
      psctl scale digits --servers 3
    """
    import msgspec

    from psctl.errors import NoSuchJob, UsageError
    from psctl.launch.jobs.job_scale import scale as request_scale
    from psctl.view.tables import draw_fields

    own = Context.of(context)
    if workers is None and servers is None:
        raise UsageError("neither --workers nor --servers is given", hint="psctl scale JOB --workers N --servers M")
    record = own.home.job(job)
    if record.over:
        raise NoSuchJob(f"{record.job} has ended", hint=f"psctl checkpoint list {record.job}", where=record.job)
    with own.head_shell(record, acts=True) as (shell, record):
        done = request_scale(shell, record, workers, servers)
    lines = {
        name: str(counts.after) if counts.before == counts.after else f"{counts.before} -> {counts.after}"
        for name, counts in (("workers", done.workers), ("servers", done.servers))
    }
    own.print_result(msgspec.to_builtins(done), lambda console, _: draw_fields(console, {"job": done.job, **lines}))
    own.tell(f"follow it: psctl attach {record.job}")
