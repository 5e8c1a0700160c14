"""psctl bench: measure strategies on a cluster and compare them with the plan."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterOption, ServersOption, WorkersOption


def bench(
    context: typer.Context,
    operation: Annotated[str, typer.Argument(metavar="allreduce|pushpull", help="Operation to measure.")],
    cluster: ClusterOption = None,
    workers: WorkersOption = None,
    servers: ServersOption = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="1KB:256MB", help="A:B by powers of four, or a list A,B,C.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="all|S,S",
            help="Strategies to measure; all: every feasible one.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    congestion: Annotated[
        str | None,
        typer.Option(
            "--congestion", metavar="all|C,C", help="pushpull: compare TCP congestion controls and recommend one."
        ),
    ] = None,
) -> int:
    """Measure strategies on a cluster beside their predictions.

    Later plans use the measured cost of messages.

    allreduce: each strategy sums a vector over all workers. pushpull: workers push it to parameter servers and
    pull the sum. A time is the slowest worker's, from a barrier on. --congestion then repeats the largest size under
    each congestion control that all hosts allow.

    \b
    Examples:
      psctl bench allreduce --cluster lab --sizes 4KB:64MB
      psctl bench pushpull --workers 4 --servers 2
    """
    from psctl.cli.shared.bench_jobs import BenchCall
    from psctl.errors import UsageError
    from psctl.launch.bench import bench_runs
    from psctl.launch.bench.congestion import controls_of
    from psctl.view.tables import draw_bench

    own = Context.of(context)
    if operation not in ("allreduce", "pushpull"):
        raise UsageError(f"psctl bench {operation}: unknown", hint="allreduce or pushpull")
    if congestion is not None and operation != "pushpull":
        raise UsageError("--congestion: psctl's own connections are measured by pushpull", hint="psctl bench pushpull")
    bench_request = bench_runs.BenchRequest(
        "allreduce" if operation == "allreduce" else "pushpull", bench_runs.sizes_of(sizes),
        bench_runs.strategies_of(strategy, "allreduce" if operation == "allreduce" else "pushpull"), workers, servers,
        controls_of(congestion),
    )  # fmt: skip
    call = BenchCall(own, own.cluster(cluster, lent=True), bench_request)
    code = call.run()
    own.print_result(call.document(), draw_bench)
    return code
