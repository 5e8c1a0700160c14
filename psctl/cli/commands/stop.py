"""psctl stop: end a job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def stop(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="digits-3, or digits for its newest; nothing: the newest.", autocompletion=completion.jobs),
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Write a checkpoint first, whatever the job file says.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Do not ask the job: end its processes now.")] = False,
) -> None:
    """End a job, and prove that nothing of it is left on any host."""
    import msgspec

    from psctl.errors import UsageError
    from psctl.launch.jobs import job_end as ending
    from psctl.view.tables import draw_fields

    own: Context = context.obj
    if save and force:
        raise UsageError("--save and --force: killed processes save nothing", hint="leave one of them out")
    record = own.home.job(job)
    if not record.over:
        own.tell(f"stopping {record.job}")
    with own.connect(own.cluster_of(record, acts=True), [host.name for host in record.hosts]) as fleet:
        done = ending.stop(own.home, record, fleet, save=save, force=force, by="psctl stop")
    own.result(
        msgspec.to_builtins(done), lambda console, fields: draw_fields(console, {fields["job"]: fields["state"]})
    )
    if done.was in ("done", "failed", "stopped"):
        own.tell(f"{done.job} had ended already")
    if done.checkpoint is not None and done.state != "done":
        own.tell(f"continue: psctl checkpoint restore {done.checkpoint}")


VERB = stop
