"""psctl plan: the predicted time of every strategy, the choice, the reason."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.context import Context


def plan(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(metavar="JOB.yaml", help="Job file; nothing: any job.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Cluster file or name.")] = None,
    topology: Annotated[str | None, typer.Option("--topology", metavar="FILE", help="Not in this version.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="160MB", help="Bytes of gradients a worker.")] = None,
    world: Annotated[int | None, typer.Option("--world", min=1, metavar="N", help="Number of ranks.")] = None,
) -> None:
    """Predict the time of every strategy and say which is chosen, and why; changes nothing."""
    from psctl.cli import launching
    from psctl.errors import NotInThisVersion
    from psctl.launch import planning
    from psctl.view.tables import draw_plan

    own: Context = context.obj
    if topology is not None:
        raise NotInThisVersion("plan --topology", hint="plan --cluster C looks at the hosts themselves")
    wanted = planning.job_of(*own.cwd_file(job, "a job file")) if job else planning.any_job()
    folder = launching.folder_of(wanted.source) if job else None
    chosen = own.cluster(cluster, wanted.cluster, folder)
    known = launching.size_of(size) or wanted.sync.size or launching.last_size(own, wanted.name)
    with own.connect(chosen) as fleet:
        document = planning.plan(own.home, chosen, fleet, wanted, known, world)
    own.result(document, draw_plan)


VERB = plan
