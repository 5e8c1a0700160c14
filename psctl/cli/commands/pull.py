"""psctl pull: fetch what a job's script wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument
from psctl.types import Document

if TYPE_CHECKING:
    from psctl.view.console import Console


def pull(
    context: typer.Context,
    job: RunningJobArgument,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN...]", help="Which files, as in .gitignore; the job's `outputs:` by default."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("-o", "--to", metavar="DIR", help="The folder; outputs/JOB beside the job file by default."),
    ] = None,
) -> None:
    """Fetch what a job's script wrote, from all its hosts.

    Without a pattern, and without `outputs:` in the job file, these are all files that the script wrote in its folder.
    A file that several hosts have with different contents comes from each, into a folder named by the host's first
    worker: worker-1/out/log.txt. An interrupted transfer continues, and an unchanged file is not fetched again. (-o is
    the folder here; --output json prints the result as JSON.)

    \b
    Examples:
      psctl pull digits
      psctl pull digits-3 "*.png" out/ --to results
    """
    import msgspec

    from psctl.cli.shared import outputs
    from psctl.errors import UsageError
    from psctl.launch.files import output_pull
    from psctl.launch.hosts.converge import verdict
    from psctl.spec.data import check_outputs

    own = Context.of(context)
    record = own.home.job(job)
    wanted = tuple(patterns or outputs.patterns_of(record))
    for _, message, hint in check_outputs(wanted):
        raise UsageError(f"PATTERN: {message}", hint)
    folder = to.expanduser().absolute() if to is not None else outputs.make_folder(record)
    names = [host.name for host in record.hosts]
    with own.connect(own.cluster_of(record), names) as fleet:
        record = outputs.with_ranks(fleet, record)
        pulled, failed = output_pull.pull(own.home, fleet, record, wanted, folder)
    own.print_results(msgspec.to_builtins(pulled), _draw, verdict(failed, len(names), "fetched"))


def _draw(console: Console, document: Document) -> None:
    from psctl.units import format_bytes
    from psctl.view.console import say
    from psctl.view.tables import draw_table
    from psctl.view.text import one_line

    rows = [
        [one_line(each["path"]), each["host"], format_bytes(each["bytes"]), "" if each["fetched"] else "unchanged"]
        for each in document["files"]
    ]
    if rows:
        draw_table(console, ("file", "host", "size", ""), rows, right=("size",))
        say(console, f"in {document['to']}")
    else:
        say(console, "no files: the script wrote none that match")
