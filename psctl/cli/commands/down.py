"""psctl down: undo `up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterArgument


def down(
    context: typer.Context,
    cluster: ClusterArgument = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove logs and checkpoints there too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Stop running jobs first.")] = False,
) -> None:
    """Undo `up`: remove psctl, code and environments from the hosts. Logs and checkpoints stay unless --purge.

    \b
    Examples:
      psctl down lab
      psctl down lab --purge
    """
    import msgspec

    from psctl.launch.clusters import shown_path
    from psctl.launch.home import PARTIAL
    from psctl.launch.hosts.converge import verdict
    from psctl.launch.hosts.site import inspect_hosts
    from psctl.launch.setup import teardown
    from psctl.view.tables import draw_up

    own = Context.of(context)
    chosen = own.cluster(cluster, lent=True)
    where = ", ".join(host.name for host in chosen.spec.hosts)
    if purge:
        jobs = [record.job for record in own.home.jobs() if record.cluster.name == chosen.spec.name]
        of = f" of {', '.join(jobs)}" if jobs else ""
        own.confirm(f"remove {chosen.spec.runtime.workdir} with all logs and checkpoints{of} from {where}")
    with own.connect(chosen) as fleet:
        sites, failed = inspect_hosts(chosen.spec, fleet)
        running = teardown.running_jobs(sites)
        if running and force:
            own.confirm(f"end running jobs: {teardown.listed(running)}")
        rows = teardown.tear_down(
            own.home, chosen, fleet, sites, failed, purge=purge, force=force, progress=own.progress
        )
    if not failed:
        own.home.remove_cluster(chosen.spec.name)
    elif len(failed) < len(rows) and chosen.spec.name in own.home.clusters():
        own.home.save_cluster(msgspec.structs.replace(own.home.cluster(chosen.spec.name), state=PARTIAL))
    own.print_results(
        {"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(rows)},
        draw_up,
        verdict(failed, len(rows), "cleared"),
    )
    own.tell(f"{chosen.spec.name} is down")
    if not purge:
        named = chosen.spec.name if chosen.embedded else shown_path(Path(chosen.known.source))
        own.tell(f"logs and checkpoints are still there; psctl down {named} --purge removes them")
