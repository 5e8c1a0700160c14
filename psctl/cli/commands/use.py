"""psctl use: make a cluster the current one."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def use(
    context: typer.Context,
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER",
            help="Cluster file, the name of a known one, or local: this machine.",
            autocompletion=completion.clusters,
        ),
    ],
) -> None:
    """Make a cluster the default of all commands; contact no host.

    \b
    Examples:
      psctl use lab
    """
    import msgspec

    from psctl.launch import clusters
    from psctl.view.tables import draw_clusters

    own = Context.of(context)
    chosen = own.cluster(cluster)
    clusters.make_current(own.home, chosen)
    row = next(row for row in clusters.cluster_rows(own.home) if row.current)
    own.print_result(msgspec.to_builtins(row), lambda console, shown: draw_clusters(console, {"clusters": [shown]}))
    other = own.environment.get("PSCTL_CLUSTER")
    if other:
        own.warn(f"PSCTL_CLUSTER={other} in this shell takes precedence over the current cluster")
    own.tell(f"Next: {own.train_command(chosen)}")
