"""psctl up: make the hosts of a cluster ready."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterArgument, DryRunOption


def up(context: typer.Context, cluster: ClusterArgument = None, dry_run: DryRunOption = False) -> None:
    """Install psctl and its environment on the hosts of a cluster. Safe to repeat; running jobs are not touched."""
    import msgspec

    from psctl.launch.clusters import make_current
    from psctl.launch.hosts import converge
    from psctl.launch.setup import cluster_setup
    from psctl.view.tables import draw_up

    own = Context.of(context)
    chosen = own.cluster(cluster)
    names = [host.name for host in chosen.spec.hosts]
    with own.connect(chosen) as fleet:
        state = cluster_setup.decide(own.home, chosen, fleet)
        if not dry_run:
            for warning in cluster_setup.carry_out(own.home, chosen, fleet, state, own.progress):
                own.warn(warning)
    rows = converge.outcomes(state, names)
    if not dry_run and len(state.failed) < len(names):
        make_current(own.home, chosen)
    error = converge.verdict(state.failed, len(names))
    own.print_results({"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(rows)}, draw_up, error)
    if dry_run:
        own.tell("nothing was touched")
        return
    unchanged = all(row.state == "unchanged" for row in rows)
    ready = "unchanged: every host is ready" if unchanged else f"{chosen.spec.name} is ready and the current cluster"
    own.tell(f"{ready}. Next: {own.train_command(chosen)}")
