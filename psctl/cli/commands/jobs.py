"""psctl jobs: every job that was started from this machine."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context


def jobs(context: typer.Context) -> None:
    """List every job that was started from this machine."""
    from psctl.launch.jobs.job_status import refresh
    from psctl.view.tables import draw_jobs

    own: Context = context.obj
    rows = refresh(own.home, own.home.jobs(), own.connect)
    own.result({"jobs": rows}, draw_jobs)
    for row in rows:
        if row.get("problem"):
            own.warn(f"{row['job']}: {row['problem']}")


VERB = jobs
