"""psctl up: make the hosts ready."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.context import Context


def up(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Cluster file, or the name of a known one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
) -> None:
    """Converge the hosts of a cluster: psctl itself, its environment. Safe to repeat; running jobs are not touched."""
    import msgspec

    from psctl.launch import converge, measure
    from psctl.view.tables import draw_up

    own: Context = context.obj
    chosen = own.cluster(cluster)
    names = [host.name for host in chosen.spec.hosts]
    with own.connect(chosen) as fleet:
        state = converge.look_at_all(chosen, fleet)
        if len(state.plans) > 1:
            converge.check_versions(state)
        measure.plan(own.home, chosen, state)
        if not dry_run:
            converge.carry_out(state, fleet, own.progress)
            for warning in measure.carry_out(own.home, chosen, fleet, state, own.progress):
                own.warn(warning)
    rows = converge.outcomes(state, names)
    if not dry_run and len(state.failed) < len(names) and not chosen.embedded:
        own.home.remember(chosen.known)
    error = converge.verdict(state.failed, len(names))
    own.results({"hosts": msgspec.to_builtins(rows)}, draw_up, error)
    if dry_run:
        own.tell("nothing was touched")
    elif all(row.state == "unchanged" for row in rows):
        own.tell("unchanged: every host is ready. Next: psctl train JOB.yaml")
    else:
        current = "" if chosen.embedded else " and the current cluster"
        own.tell(f"{chosen.spec.name} is ready{current}. Next: psctl train JOB.yaml")


VERB = up
