"""psctl doctor: check every host."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def doctor(
    context: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Argument(
            metavar="CLUSTER", help="Cluster file or name; nothing: the current.", autocompletion=completion.clusters
        ),
    ] = None,
) -> None:
    """Check every host in parallel, from its name to the way between hosts; changes nothing."""
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.jobs import host_checks as examination
    from psctl.view.tables import draw_doctor

    own: Context = context.obj
    chosen = own.cluster(cluster)
    reports = examination.examine(own.home, chosen, own.connect)
    failed = {report.name: report.error for report in reports if report.error is not None}
    document = {"cluster": chosen.spec.name, **examination.document(reports)}
    own.results(document, draw_doctor, verdict(failed, len(reports), "well"))
    own.tell(f"{chosen.spec.name}: all well. Next: {own.train_command(chosen)}")


VERB = doctor
