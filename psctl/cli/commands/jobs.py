"""psctl jobs: list the jobs that were started from this machine."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context


def jobs(context: typer.Context) -> None:
    """List every job that was started from this machine.

    \b
    Examples:
      psctl jobs
    """
    from psctl.launch.jobs.job_status import refresh
    from psctl.view.tables import draw_jobs

    own = Context.of(context)
    rows = refresh(own.home, own.home.jobs(), own.connect)
    own.print_result({"jobs": rows}, draw_jobs)
    own.warn_of_problems(rows)
