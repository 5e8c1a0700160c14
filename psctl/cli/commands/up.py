"""psctl up: make the hosts of a cluster ready."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterArgument, DryRunOption


def up(context: typer.Context, cluster: ClusterArgument = None, dry_run: DryRunOption = False) -> None:
    """Install psctl and its environment on the hosts of a cluster. Safe to repeat.

    Running jobs go on. Where a host of theirs has booted, psctl's agent is started again, and the job may use the host.
    """
    import msgspec

    from psctl.launch.clusters import make_current
    from psctl.launch.hosts import converge
    from psctl.launch.jobs.restart_agents import restart_agents
    from psctl.launch.setup import cluster_setup
    from psctl.view.tables import draw_up

    own = Context.of(context)
    chosen = own.cluster(cluster)
    with cluster_setup.inspect(own.home, chosen, own.connect) as reached:
        if not dry_run:
            for warning in cluster_setup.carry_out(reached, own.progress):
                own.warn(warning)
            for agent in restart_agents(reached):
                own.tell(f"{agent.job}: psctl's agent on {agent.host} was started again; the job may use the host")
    rows = converge.outcomes(reached)
    if not dry_run and len(reached.failed) < len(rows):
        make_current(own.home, chosen)
    error = converge.verdict(reached.failed, len(rows))
    own.print_results({"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(rows)}, draw_up, error)
    if dry_run:
        own.tell("nothing was touched")
        return
    unchanged = all(row.state == "unchanged" for row in rows)
    ready = "unchanged: every host is ready" if unchanged else f"{chosen.spec.name} is ready and the current cluster"
    own.tell(f"{ready}. Next: {own.train_command(chosen)}")
