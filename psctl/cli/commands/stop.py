"""psctl stop: end a job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import JobArgument


def stop(
    context: typer.Context,
    job: JobArgument = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write a checkpoint first, even if the job file disables it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Kill the processes now, without a request to the job.")
    ] = False,
) -> None:
    """End a job; verify that none of its processes is left.

    \b
    Examples:
      psctl stop digits --save
      psctl stop digits-3 --force
    """
    import msgspec

    from psctl.errors import UsageError
    from psctl.launch import cluster_hosts
    from psctl.launch.jobs import job_end
    from psctl.view.tables import draw_fields

    own = Context.of(context)
    if save and force:
        raise UsageError("--save and --force: killed processes save nothing", hint="leave one of them out")
    record = own.home.job(job)
    if not record.over:
        own.tell(f"stopping {record.job}")
    with own.connect(own.cluster_of(record, acts=True), [host.name for host in record.hosts]) as fleet:
        done = job_end.stop(own.home, record, fleet, save=save, force=force, by="psctl stop")
    if record.cluster.owned:
        cluster_hosts.release(record.cluster.allocation)
    own.print_result(msgspec.to_builtins(done), lambda console, row: draw_fields(console, {row["job"]: row["state"]}))
    if done.was in ("done", "failed", "stopped"):
        own.tell(f"{done.job} had ended already")
    if done.checkpoint is not None and done.state != "done":
        own.tell(f"continue: psctl checkpoint restore {done.checkpoint}")
