"""psctl up: make the hosts of a cluster ready."""

from __future__ import annotations

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterArgument, DryRunOption


def up(context: typer.Context, cluster: ClusterArgument = None, dry_run: DryRunOption = False) -> int:
    """Install psctl and its environment on the hosts of a cluster. Safe to repeat.

    The links between several hosts are measured, and the cost of messages by a short job on all of them.
    Running jobs go on. They may use hosts of theirs that have booted, and hosts that are new in the cluster file: for
    lost workers and servers, for those that `psctl scale` adds, and where `workers: {min, max}` leaves room.

    \b
    Examples:
      psctl up ./cluster.yaml --dry-run
      psctl up lab
    """
    import msgspec

    from psctl.cli.shared.bench_jobs import MessageMeasurement
    from psctl.errors import PsctlError
    from psctl.launch.clusters import make_current
    from psctl.launch.hosts import converge
    from psctl.launch.jobs.join_running_jobs import codes_of_running_jobs, join_running_jobs
    from psctl.launch.measure import calibration
    from psctl.launch.setup import cluster_setup
    from psctl.view.tables import draw_up

    own, code = Context.of(context), 0
    chosen = own.cluster(cluster, lent=True)
    with cluster_setup.inspect(own.home, chosen, own.connect, codes_of_running_jobs(own.home, chosen)) as reached:
        calibration.plan(reached)
        if not dry_run:
            for warning in cluster_setup.carry_out(reached, own.progress):
                own.warn(warning)
            for joined in join_running_jobs(reached, own.progress):
                if joined.problem:
                    own.warn(f"{joined.job}: {joined.host} was not added to its hosts: {joined.problem}")
                elif joined.new:
                    own.tell(f"{joined.job}: {joined.host} was added to its hosts")
                else:
                    own.tell(f"{joined.job}: its agent on {joined.host} was started again; the job may use the host")
    if not dry_run and calibration.planned(reached):
        try:
            code = MessageMeasurement(own, chosen).run()
            if code:
                calibration.drop(reached)  # interrupted
        except PsctlError as why:
            calibration.drop(reached)
            own.warn(f"the cost of messages was not measured: {why.message}; psctl bench allreduce measures it")
    rows = converge.outcomes(reached)
    if not dry_run and len(reached.failed) < len(rows):
        make_current(own.home, chosen)
    error = converge.verdict(reached.failed, len(rows))
    own.print_results({"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(rows)}, draw_up, error)
    if dry_run:
        own.tell("nothing was touched")
        return 0
    unchanged = all(row.state == "unchanged" for row in rows)
    ready = "unchanged: every host is ready" if unchanged else f"{chosen.spec.name} is ready and the current cluster"
    own.tell(f"{ready}. Next: {own.train_command(chosen)}")
    return code
