"""psctl clusters: list the known clusters and mark the current one."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context


def clusters(context: typer.Context) -> None:
    """List the clusters known on this machine; contact no host.

    \b
    Examples:
      psctl clusters
    """
    import msgspec

    from psctl.launch.clusters import cluster_rows
    from psctl.view.tables import draw_clusters

    own = Context.of(context)
    own.print_result({"clusters": msgspec.to_builtins(cluster_rows(own.home))}, draw_clusters)
