"""psctl attach: follow a job again."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def attach(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="digits-3, or digits for its newest; nothing: the newest.", autocompletion=completion.jobs),
    ] = None,
    on_interrupt: Annotated[
        str | None, typer.Option("--on-interrupt", metavar="detach|stop", help="What the first Ctrl-C does.")
    ] = None,
) -> int:
    """Follow a job again, from its first event; ends with the job's own exit code."""
    from psctl.cli.shared.following import Presses, check_on_interrupt, follow
    from psctl.launch import agent_calls
    from psctl.types import HostName

    own: Context = context.obj
    check_on_interrupt(on_interrupt)
    record = own.home.job(job)
    with Presses() as presses, own.connect(own.cluster_of(record), [record.head.name]) as fleet:
        for error in fleet.failed.values():
            raise error
        runs = agent_calls.alive(fleet.shells[HostName(record.head.name)], record.head)
        return follow(own, record, presses, on_interrupt, fleet, runs=runs)


VERB = attach
