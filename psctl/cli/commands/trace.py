"""psctl trace: write the times of some steps of all workers to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument


def trace(
    context: typer.Context,
    job: RunningJobArgument,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="First and last step; the newest 10 by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.json", help="The file; JOB-A-B.json by default.")
    ] = None,
) -> None:
    """Write the times of some steps of all workers to a file.

    The file shows in chrome://tracing and Perfetto, for every worker on one clock, when it loaded its batch, computed,
    synchronized, updated and saved, and under ps when its pushes and pulls were in flight. The printed table has the
    critical path of each step: the worker that was ready last, and where its time went. Steps that are over are taken
    from memory; for later ones psctl waits. (-o is the file here; --output json prints the result as JSON.)

    \b
    Examples:
      psctl trace digits
      psctl trace digits --steps 100:110 -o trace.json
    """
    import msgspec

    from psctl.cli.shared.output_file import output_file, write_whole
    from psctl.clock import SystemClock
    from psctl.launch import leader_search
    from psctl.launch.jobs.step_times import StepReader, parse_steps
    from psctl.launch.jobs.step_trace import critical_paths, trace_file
    from psctl.view.step_times import draw_step_times

    own = Context.of(context)
    wanted = parse_steps(steps) if steps is not None else None
    record = own.home.job(job)
    output_file(out, f"{record.job}.json")
    with own.connect(own.cluster_of(record), [host.name for host in record.hosts]) as fleet:
        record = leader_search.on_fleet(fleet, record)
        found = StepReader(record, fleet, SystemClock(), own.tell).read(wanted)
    target = output_file(out, f"{record.job}-{found.first}-{found.last}.json")
    paths = critical_paths(found.spans)
    write_whole(target, msgspec.json.encode(trace_file(record.job, found.spans, paths, found.hosts, found.clocks)))
    document = {
        "job": record.job,
        "path": str(target),
        "steps": [{**msgspec.to_builtins(path), "last": f"worker/{path.last}"} for path in paths],
        "hosts": {f"worker/{rank}": host for rank, host in sorted(found.hosts.items())},
        "clocks": found.clocks,
    }
    own.print_result(document, draw_step_times)
