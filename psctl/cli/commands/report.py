"""psctl report: write the page of a job to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def report(
    context: typer.Context,
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="One job, or several to compare.", autocompletion=completion.jobs),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.html", help="The file to write; JOB.html by default.")
    ] = None,
) -> None:
    """Write the page of a job as one file that can be handed on.

    The file has the job's metrics and throughput over steps and time, what each process did, the plan beside what was
    measured, checkpoints, events and output. It holds everything that it shows and loads nothing. Of a running job it
    has what is known now. (-o is the file here; --output json prints the result as JSON.)

    \b
    Examples:
      psctl report digits -o report.html
      psctl report digits-1 digits-2 -o compared.html
    """
    from psctl.cli.shared.global_options import FORMATS, PICTURES
    from psctl.cli.shared.page_jobs import follow_on, history_of
    from psctl.errors import UsageError
    from psctl.page.board import Board
    from psctl.page.render import render

    own = Context.of(context)
    records = [own.home.job(job) for job in jobs]
    names = list(dict.fromkeys(record.job for record in records))
    target = out if out is not None else Path(f"{'-'.join(names)}.html")
    if str(target) in (*FORMATS, *PICTURES):
        raise UsageError(
            f"-o {target}: report writes a file", hint=f"-o {target}.html, or --output json for the result"
        )
    if not target.parent.is_dir() or target.is_dir():
        raise UsageError(f"{target} cannot be written: {'it' if target.is_dir() else target.parent} is "
                         f"{'a folder' if target.is_dir() else 'no folder'}", hint="-o report.html")  # fmt: skip
    board = Board()
    for record in records:
        if board.add(history_of(record)):
            follow_on(board, own, record, to_end=False)
    _, document = board.document()
    text = render(document, title=f"psctl: {', '.join(names)}", live=False)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="-o names another file") from error
    from psctl.units import format_bytes

    result = {"jobs": names, "path": str(target), "bytes": len(text.encode())}
    own.print_result(result, lambda console, found: console.print(
        f"wrote {target} ({format_bytes(found['bytes'])}): open it in a browser", markup=False, highlight=False
    ))  # fmt: skip
