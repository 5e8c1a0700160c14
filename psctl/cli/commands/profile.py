"""psctl profile: profile some steps of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument


def profile(
    context: typer.Context,
    job: RunningJobArgument,
    role: Annotated[
        str,
        typer.Option("-r", "--role", metavar="worker:N", help="The worker.", autocompletion=completion.ranks),
    ] = "worker:0",
    steps: Annotated[int, typer.Option("--steps", min=1, max=10_000, metavar="N", help="Number of steps.")] = 5,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.json", help="The file; JOB-worker-N.json by default.")
    ] = None,
) -> None:
    """Profile the next steps of a worker by torch.profiler.

    Prints the operators that took most time, and writes a trace with every operator (and kernel, on a GPU) for
    chrome://tracing or Perfetto. The worker is slower while it is profiled; the others wait for it. (-o is the file
    here; --output json prints the result as JSON.)

    \b
    Examples:
      psctl profile digits -r worker:1 --steps 5
      psctl profile digits --steps 20 -o profile.json
    """
    from psctl.cli.shared.output_file import output_file, write_whole
    from psctl.clock import SystemClock
    from psctl.launch.jobs.step_profile import profile as take
    from psctl.launch.jobs.step_profile import worker_of
    from psctl.view.console import say
    from psctl.view.text import sanitize

    own = Context.of(context)
    rank = worker_of(role)
    record = own.home.job(job)
    target = output_file(out, f"{record.job}-worker-{rank}.json")
    with own.connect(own.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        found = take(record, fleet, rank, steps, SystemClock(), own.tell)
    write_whole(target, found.trace)
    document = {
        "job": record.job, "rank": f"worker/{rank}", "host": found.host, "steps": steps, "path": str(target),
        "table": sanitize(found.table),
    }  # fmt: skip
    own.print_result(
        document,
        lambda console, shown: say(
            console,
            *shown["table"].splitlines(),
            f"wrote {target}: open it in chrome://tracing or ui.perfetto.dev",
        ),
    )
