"""psctl ssh: open a shell beside a process of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument


def ssh(
    context: typer.Context,
    job: RunningJobArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="A command to run in place of a shell.")
    ] = None,
    role: Annotated[
        str,
        typer.Option("-r", "--role", metavar="ROLE:N", help="worker:3, server:0.", autocompletion=completion.ranks),
    ] = "worker:0",
) -> None:
    """Open a shell beside a process of a job.

    It is on the process's host, in its folder and with its environment: RANK, WORLD_SIZE, PATH and your `env:` are
    those of the process. After the end of the job the folder is still there. With a command, psctl's exit code is
    the command's.

    \b
    Examples:
      psctl ssh digits -r worker:1
      psctl ssh digits-3 -r worker:1 -- nvidia-smi
    """
    import re
    import sys

    from psctl.errors import PsctlError, UsageError
    from psctl.launch import leader_search
    from psctl.launch.jobs import rank_shell
    from psctl.types import HostName

    own = Context.of(context)
    wanted = re.fullmatch(r"(worker|server)[:/]([0-9]{1,6})", role)
    if wanted is None:
        raise UsageError(f"-r {role}: expected one process", hint="-r worker:1 or -r server:0")
    record = own.home.job(job)
    chosen = own.cluster_of(record)
    shell = None
    with own.connect(chosen, [record.head.name]) as fleet:
        if not record.over:
            try:
                record = leader_search.on_fleet(fleet, record)
                shell = fleet.shells.get(HostName(record.head.name))
            except PsctlError as error:
                own.warn(f"{error.message}; the process's place is as last recorded")
        place = rank_shell.find(record, shell, wanted[1], int(wanted[2]))
    if place.host.name != record.head.name:  # what is wrong with its host is said by psctl, not by ssh
        with own.connect(chosen, [place.host.name]) as fleet:
            fleet.shell(place.host.name)
    words = rank_shell.command(chosen.spec, record.job, place, command or (), terminal=sys.stdin.isatty())
    rank_shell.replace_process(words)
