"""psctl clusters: the clusters that are known here, and which is the current one."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context


def clusters(context: typer.Context) -> None:
    """List the clusters that are known here, as this machine left them; no host is asked."""
    import msgspec

    from psctl.launch.clusters import rows
    from psctl.view.tables import draw_clusters

    own: Context = context.obj
    own.result({"clusters": msgspec.to_builtins(rows(own.home))}, draw_clusters)


VERB = clusters
