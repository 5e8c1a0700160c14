"""psctl doctor: check every host."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.context import Context


def doctor(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Cluster file or name; nothing: the current.")
    ] = None,
) -> None:
    """Check every host in parallel, from its name to the way between hosts; changes nothing."""
    from psctl.launch import doctor as examination
    from psctl.launch.converge import verdict
    from psctl.view.tables import draw_doctor

    own: Context = context.obj
    chosen = own.cluster(cluster)
    reports = examination.examine(own.home, chosen, own.connect)
    failed = {report.name: report.error for report in reports if report.error is not None}
    own.results(examination.document(reports), draw_doctor, verdict(failed, len(reports), "well"))
    own.tell(f"{chosen.spec.name}: all well. Next: psctl train JOB.yaml")


VERB = doctor
