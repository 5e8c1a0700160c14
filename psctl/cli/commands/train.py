"""psctl train: run a job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import (
    ClusterOption,
    DetachOption,
    DryRunOption,
    OnInterruptOption,
    ServersOption,
    SettingsOption,
    SizeOption,
    StrategyOption,
    WorkersOption,
)


def train(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml", help="Job file, or a folder that holds job.yaml.", autocompletion=completion.files
        ),
    ],
    detach: DetachOption = False,
    cluster: ClusterOption = None,
    workers: WorkersOption = None,
    servers: ServersOption = None,
    strategy: StrategyOption = None,
    settings: SettingsOption = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for the job; K alone: from your shell.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|latest|never|JOB@STEP",
            help="Checkpoint to continue from; of checkpoint.to: URL/JOB@STEP.",
            autocompletion=completion.resumes,
        ),
    ] = "never",
    size: SizeOption = None,
    dry_run: DryRunOption = False,
    on_interrupt: OnInterruptOption = None,
) -> int:
    """Run a job on a cluster, with live progress.

    Hosts that are not ready are made ready first, as `psctl up` would. Without a cluster it runs on this machine.

    \b
    Examples:
      psctl train mine/job.yaml
      psctl train mine/job.yaml --cluster lab --workers 8 --strategy ring
      psctl train mine/job.yaml -d --set seed=1
    """
    from psctl.cli.shared import launching
    from psctl.cli.shared.following import check_on_interrupt
    from psctl.launch.jobs.prepare import load_requested_job

    own = Context.of(context)
    bytes_ = launching.parse_size_option(size)
    launching.check_resume(own, resume)
    check_on_interrupt(on_interrupt)
    text, source = own.read_file(job, "a job file")
    wanted = load_requested_job(text, source, launching.overrides(workers, servers, strategy, settings), env or [])
    folder = launching.folder_of(source)
    chosen = own.cluster(cluster, wanted.job.cluster, folder, submits=not dry_run)
    launch = launching.JobLaunch(own, wanted, chosen)
    if dry_run:
        launch.print_dry_run(bytes_)
        return 0
    return launch.run(resume, detach=detach, on_interrupt=on_interrupt)
