"""psctl scale: promised, not built yet."""

from __future__ import annotations

from typing import Annotated

import typer


def scale(
    job: Annotated[str | None, typer.Argument(help="A running job.")] = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers.")] = None,
    servers: Annotated[str | None, typer.Option("--servers", metavar="M", help="Number of servers.")] = None,
) -> None:
    """Change a running job's number of workers and servers (not in this version)."""
    from psctl.errors import NotInThisVersion

    raise NotInThisVersion(
        "psctl scale", hint="psctl stop JOB --save, then psctl checkpoint restore JOB@latest --workers N --servers M"
    )


VERB = scale
