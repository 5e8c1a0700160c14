"""psctl plan: predict the time of every strategy and choose one."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterOption, SizeOption

_TWICE = {
    "topology": "--topology describes machines, and --cluster names others",
    "size": "--parameters gives the size, and --size another",
}


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
    compute: Annotated[
        str | None,
        typer.Option("--compute", metavar="DUR|last", help="Compute of a step: compare whole steps, with overlap."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="STRATEGY", help="Also print the terms of a step with this strategy."),
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, metavar="N", help="Number of ranks; further hosts may be servers.")
    ] = None,
) -> None:  # long: its options
    """Predict the time of every strategy. Print which is chosen and why; change nothing.

    \b
    Examples:
      psctl plan --cluster lab --size 160MB
      psctl plan mine/job.yaml --world 16
      psctl plan --cluster lab --size 160MB --compute 250ms --explain ps
    """
    from psctl.cli.shared import launching
    from psctl.errors import UsageError
    from psctl.launch.hosts.converge import inspect
    from psctl.launch.placement import job_planning
    from psctl.spec.job_file import load_job
    from psctl.view.tables import draw_plan

    own = Context.of(context)
    for both, why in ((topology and cluster, "topology"), (parameters and size, "size")):
        if both:
            raise UsageError(_TWICE[why], hint="give one of them")
    job_planning.check_strategy(explain)
    model = job_planning.model_of(parameters) if parameters is not None else None
    wanted = load_job(*own.read_file(job, "a job file")) if job else None
    known = model.size if model is not None else launching.known_size(own, size, wanted)
    seconds = launching.parse_compute_option(own, compute, wanted.name if wanted is not None else None)
    asked = job_planning.with_compute(wanted or job_planning.any_job(), seconds)
    if topology is not None:
        described = asked if wanted is not None or seconds is not None else None
        made, document = job_planning.on_paper(topology, described, known, world, model, explain)
    else:
        folder = launching.folder_of(asked.source) if wanted else None
        chosen = own.cluster(cluster, asked.cluster, folder, lent=True)
        with inspect(own.home, chosen, own.connect) as reached:
            made, document = job_planning.plan(reached, asked, known, world, model, explain)
    own.print_result(document, draw_plan)
    if own.options.verbose:
        own.detail(*job_planning.schedule_text(made))
