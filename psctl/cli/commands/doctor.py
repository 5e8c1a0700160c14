"""psctl doctor: check every host."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterArgument


def doctor(context: typer.Context, cluster: ClusterArgument = None) -> None:
    """Check every host, from its name to its network. Change nothing.

    Several hosts are a grid; -v shows the details of passed checks.

    \b
    Examples:
      psctl doctor lab
      psctl doctor ./cluster.yaml -o json
    """
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.setup import doctor
    from psctl.view.doctor_table import draw_doctor

    own = Context.of(context)
    chosen = own.cluster(cluster, lent=True)
    reports = doctor.examine(own.home, chosen, own.connect)
    failed = {report.name: report.error for report in reports if report.error is not None}
    document = {"cluster": chosen.spec.name, **doctor.document(reports)}
    own.print_results(
        document,
        lambda console, document: draw_doctor(console, document, details=own.options.verbose > 0),
        verdict(failed, len(reports), "well"),
    )
    own.tell(f"{chosen.spec.name}: all checks passed. Next: {own.train_command(chosen)}")
