"""psctl down: undo `up`."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.context import Context


def down(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Cluster file or name; nothing: the current.")
    ] = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove logs and checkpoints there too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Stop running jobs first.")] = False,
) -> None:
    """Undo `up`: remove psctl, code and environments from the hosts. Logs and checkpoints stay unless --purge."""
    from psctl.launch import teardown
    from psctl.launch.converge import verdict
    from psctl.view.tables import draw_up

    own: Context = context.obj
    chosen = own.cluster(cluster)
    if purge:
        own.confirm(f"remove all logs and checkpoints from the hosts of {chosen.spec.name}", asked_for=True)
    with own.connect(chosen) as fleet:
        rows, failed = teardown.tear_down(own.home, chosen, fleet, purge=purge, force=force, say=own.progress)
    if not failed:
        own.home.forget(chosen.spec.name)
    own.results({"hosts": rows}, draw_up, verdict(failed, len(rows), "cleared"))
    own.tell(f"{chosen.spec.name} is down")
    if not purge:
        command = " ".join(["psctl down", *([chosen.known.source] if chosen.known.source else []), "--purge"])
        own.tell(f"logs and checkpoints are still there; {command} removes them")


VERB = down
