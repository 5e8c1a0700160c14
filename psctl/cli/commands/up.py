"""psctl up: make the hosts ready."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def up(
    context: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Argument(
            metavar="CLUSTER", help="Cluster file, or the name of a known one.", autocompletion=completion.clusters
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
) -> None:
    """Converge the hosts of a cluster: psctl itself, its environment. Safe to repeat; running jobs are not touched."""
    import msgspec

    from psctl.launch.clusters import use
    from psctl.launch.hosts import converge
    from psctl.launch.jobs import readying
    from psctl.view.tables import draw_up

    own: Context = context.obj
    chosen = own.cluster(cluster)
    names = [host.name for host in chosen.spec.hosts]
    with own.connect(chosen) as fleet:
        state = readying.decide(own.home, chosen, fleet)
        if not dry_run:
            for warning in readying.carry_out(own.home, chosen, fleet, state, own.progress):
                own.warn(warning)
    rows = converge.outcomes(state, names)
    if not dry_run and len(state.failed) < len(names):
        use(own.home, chosen)
    error = converge.verdict(state.failed, len(names))
    own.results({"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(rows)}, draw_up, error)
    if dry_run:
        own.tell("nothing was touched")
        return
    unchanged = all(row.state == "unchanged" for row in rows)
    ready = "unchanged: every host is ready" if unchanged else f"{chosen.spec.name} is ready and the current cluster"
    own.tell(f"{ready}. Next: {own.train_command(chosen)}")


VERB = up
