"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.types import STRATEGIES

ClusterArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CLUSTER",
        help="Cluster file or name; without it the current cluster.",
        autocompletion=completion.clusters,
    ),
]
JobArgument = Annotated[
    str | None,
    typer.Argument(
        help="digits-3, or digits for its newest run; without it the newest job.", autocompletion=completion.jobs
    ),
]
RunningJobArgument = Annotated[
    str, typer.Argument(help="A running job: digits-3, or digits for its newest run.", autocompletion=completion.jobs)
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB@STEP",
        help="digits-3@500, digits-3@latest, digits@best; of checkpoint.to URL/JOB@STEP.",
        autocompletion=completion.checkpoints,
    ),
]

ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Cluster file or name.", autocompletion=completion.clusters)
]
WorkersOption = Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers.")]
ServersOption = Annotated[str | None, typer.Option("--servers", metavar="N", help="Number of parameter servers.")]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help=f"auto, or one of: {', '.join(STRATEGIES)}.",
        autocompletion=completion.strategies,
    ),
]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file, such as seed=1.")
]
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="160MB", help="Bytes of gradients of one worker, for the plan.")
]
DetachOption = Annotated[bool, typer.Option("-d", "--detach", help="Start the job, print its name, and exit.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")]
OnInterruptOption = Annotated[
    str | None, typer.Option("--on-interrupt", metavar="detach|stop", help="Effect of the first Ctrl-C.")
]
