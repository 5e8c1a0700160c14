"""psctl train: run a job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def train(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml", help="Job file, or a folder that holds job.yaml.", autocompletion=completion.files
        ),
    ],
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Start it, print its name, and leave.")] = False,
    cluster: completion.ClusterOption = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers.")] = None,
    servers: Annotated[str | None, typer.Option("--servers", metavar="N", help="Number of parameter servers.")] = None,
    strategy: completion.StrategyOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file, such as seed=1.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for the job; bare K: from your shell.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|latest|never|JOB@STEP",
            help="Checkpoint to go on from.",
            autocompletion=completion.resumes,
        ),
    ] = "never",
    size: Annotated[
        str | None, typer.Option("--size", metavar="160MB", help="Bytes of gradients, for the plan of --dry-run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
    on_interrupt: Annotated[
        str | None, typer.Option("--on-interrupt", metavar="detach|stop", help="What the first Ctrl-C does.")
    ] = None,
) -> int:
    """Run a job on a cluster, with live progress.

    Hosts that are not ready are made ready first, as `psctl up` would. Without a cluster it runs on this machine.
    """
    from psctl.cli.shared import launching
    from psctl.cli.shared.following import check_on_interrupt
    from psctl.launch.jobs.prepare import load_wanted

    own: Context = context.obj
    bytes_ = launching.size_of(size)
    launching.check_resume(own, resume)
    check_on_interrupt(on_interrupt)
    text, source = own.cwd_file(job, "a job file")
    overrides = launching.overrides(workers, servers, strategy, settings or [])
    wanted = load_wanted(text, source, overrides, env or [])
    run = launching.Run(own, wanted, own.cluster(cluster, wanted.job.cluster, launching.folder_of(source)))
    if dry_run:
        run.dry(bytes_)
        return 0
    return run.go(resume, detach=detach, on_interrupt=on_interrupt)


VERB = train
