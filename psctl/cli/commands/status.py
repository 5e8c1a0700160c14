"""psctl status: what runs, rank by rank, and the hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def status(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="One job; nothing: all that run, else the newest.", autocompletion=completion.jobs),
    ] = None,
) -> None:
    """Show running jobs rank by rank, and the hosts of their cluster."""
    from psctl.launch.jobs import job_status as looking
    from psctl.view.tables import draw_status

    own: Context = context.obj
    if job is not None:
        records = [own.home.job(job)]
    else:
        everything = own.home.jobs()
        records = [record for record in everything if not record.over] or everything[-1:]
    chosen = own.cluster_of(records[-1]) if records else own.cluster(None)
    jobs = looking.refresh(own.home, records, own.connect)
    own.result({"jobs": jobs, "hosts": looking.host_rows(own.home, chosen, own.connect)}, draw_status)
    for row in jobs:
        if row.get("problem"):
            own.warn(f"{row['job']}: {row['problem']}")


VERB = status
