"""psctl stacks: show what the processes of a running job execute."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument


def stacks(
    context: typer.Context,
    job: RunningJobArgument,
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
) -> None:
    """Show the Python stacks of a running job's processes.

    Workers and servers on all hosts write the stacks of their threads, also while a library holds the interpreter
    lock; training goes on. Processes with equal stacks are joined. Of a process that writes none within seconds the
    reason is shown. Threads of libraries are counted; -v shows them too.

    \b
    Examples:
      psctl stacks digits
      psctl stacks digits -r worker:1
    """
    import msgspec

    from psctl.errors import NoSuchJob
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.jobs.job_logs import RankSelector
    from psctl.launch.jobs.job_stacks import gather
    from psctl.view.stacks import draw_stacks

    own = Context.of(context)
    selector = RankSelector(role)
    record = own.home.job(job)
    if record.over:
        raise NoSuchJob(f"{record.job} has ended", hint=f"psctl logs {record.job}", where=record.job)
    with own.connect(own.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        processes, missing = gather(record, fleet, selector)
    error = verdict(missing, len(record.hosts), "read")
    if error is not None and len(missing) == len(record.hosts):
        raise error
    own.print_results(
        {"job": record.job, "processes": [msgspec.to_builtins(each) for each in processes]},
        lambda console, document: draw_stacks(console, document, every=own.options.verbose > 0),
        error,
    )
