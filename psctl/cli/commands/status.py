"""psctl status: show running jobs and their hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def status(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="One job; without it all running jobs, else the newest.", autocompletion=completion.jobs),
    ] = None,
) -> None:
    """Show running jobs rank by rank, and their cluster's hosts.

    \b
    Examples:
      psctl status
      psctl status digits-3 -o json
    """
    from psctl.launch.jobs import job_status
    from psctl.view.tables import draw_status

    own = Context.of(context)
    if job is not None:
        records = [own.home.job(job)]
    else:
        known = own.home.jobs()
        records = [record for record in known if not record.over] or known[-1:]
    chosen = own.cluster_of(records[-1]) if records else own.cluster(None)
    rows, hosts = job_status.overview(own.home, records, chosen, own.connect)
    own.print_result({"jobs": rows, "hosts": hosts}, draw_status)
    own.warn_of_problems(rows)
