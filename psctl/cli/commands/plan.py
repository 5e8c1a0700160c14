"""psctl plan: predict the time of every strategy and choose one."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterOption, SizeOption


def plan(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB.yaml", help="Job file; without it any job.", autocompletion=completion.files),
    ] = None,
    cluster: ClusterOption = None,
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="FILE", help="Machines of a file: output of topo -o json, or a matrix."),
    ] = None,
    size: SizeOption = None,
    parameters: Annotated[
        str | None,
        typer.Option("--parameters", metavar="1e9", help="Parameters of the model: also plan the servers' memory."),
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, metavar="N", help="Number of ranks; further hosts may be servers.")
    ] = None,
) -> None:
    """Predict the time of every strategy. Print which is chosen and why; change nothing.

    \b
    Examples:
      psctl plan --cluster lab --size 160MB
      psctl plan mine/job.yaml --world 16
    """
    from psctl.cli.shared import launching
    from psctl.errors import UsageError
    from psctl.launch.hosts.converge import inspect
    from psctl.launch.placement import job_planning
    from psctl.spec.job import load_job
    from psctl.view.tables import draw_plan

    own = Context.of(context)
    if topology is not None and cluster is not None:
        raise UsageError("--topology describes machines, and --cluster names others", hint="give one of them")
    if parameters is not None and size is not None:
        raise UsageError("--parameters gives the size, and --size another", hint="give one of them")
    model = job_planning.model_of(parameters) if parameters is not None else None
    wanted = load_job(*own.read_file(job, "a job file")) if job else None
    known = model.size if model is not None else launching.parse_size_option(size)
    if known is None and wanted is not None:
        known = wanted.sync.size or launching.last_size(own, wanted.name)
    if topology is not None:
        made, document = job_planning.on_paper(topology, wanted, known, world, model)
    else:
        asked = wanted or job_planning.any_job()
        folder = launching.folder_of(asked.source) if wanted else None
        chosen = own.cluster(cluster, asked.cluster, folder, lent=True)
        with inspect(own.home, chosen, own.connect) as reached:
            made, document = job_planning.plan(reached, asked, known, world, model)
    own.print_result(document, draw_plan)
    if own.options.verbose:
        own.detail(*job_planning.schedule_text(made))
