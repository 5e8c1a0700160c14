"""psctl report: write the page of a job to a file."""

from __future__ import annotations

import contextlib
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
    from psctl.cli.shared.output_file import output_file, write_whole
    from psctl.cli.shared.page_jobs import follow_on, history_of, read_newest_steps
    from psctl.errors import PsctlError
    from psctl.page.board import Board
    from psctl.page.render import render

    own = Context.of(context)
    records = [own.home.job(job) for job in jobs]
    names = list(dict.fromkeys(record.job for record in records))
    target = output_file(out, f"{'-'.join(names)}.html")
    board = Board()
    for record in records:
        if board.add(history_of(record)):
            follow_on(board, own, record, to_end=False)
            if not record.over:
                with contextlib.suppress(PsctlError):  # it has ended meanwhile, or makes no steps: the rest is shown
                    read_newest_steps(board, own, record)
    _, document = board.document()
    text = render(document, title=f"psctl: {', '.join(names)}", live=False)
    write_whole(target, text.encode())
    from psctl.units import format_bytes

    result = {"jobs": names, "path": str(target), "bytes": len(text.encode())}
    own.print_result(result, lambda console, found: console.print(
        f"wrote {target} ({format_bytes(found['bytes'])}): open it in a browser", markup=False, highlight=False
    ))  # fmt: skip
