"""psctl bench: promised, not built yet."""

from __future__ import annotations

from typing import Annotated

import typer


def bench(
    operation: Annotated[str | None, typer.Argument(metavar="allreduce|pushpull", help="What to measure.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Cluster file or name.")] = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers.")] = None,
    servers: Annotated[str | None, typer.Option("--servers", metavar="N", help="Number of servers.")] = None,
    sizes: Annotated[str | None, typer.Option("--sizes", metavar="1KB:256MB", help="Sizes to measure.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", metavar="all|S,S", help="What to measure.")] = None,
) -> None:
    """Measure strategies beside their predictions (not in this version)."""
    from psctl.errors import NotInThisVersion

    raise NotInThisVersion("psctl bench", hint="psctl plan prints the predictions")


VERB = bench
