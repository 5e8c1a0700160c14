"""psctl bench: measure strategies on a cluster and compare them with the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import ClusterOption, ServersOption, WorkersOption

if TYPE_CHECKING:
    from psctl.job.bench_messages import Operation


def bench(
    context: typer.Context,
    operation: Annotated[str, typer.Argument(metavar="allreduce|pushpull|broadcast|...", help="Operation to measure.")],
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

    allreduce: each strategy sums a vector over all workers. pushpull: workers push it to parameter servers and
    pull the sum. Later plans use the measured cost of messages. broadcast, reduce, gather, scatter, all-gather,
    reduce-scatter, all-to-all: each algorithm that psctl has for the collective, and the engine's own (native);
    --sizes are the bytes that nccl-tests count. A time is the slowest worker's, from a barrier on. --congestion then
    repeats the largest size of pushpull under each congestion control that all hosts allow.

    \b
    Examples:
      psctl bench allreduce --cluster lab --sizes 4KB:64MB
      psctl bench pushpull --workers 4 --servers 2
      psctl bench broadcast --workers 4 --sizes 1MB,64MB
    """
    from psctl.cli.shared.bench_jobs import BenchCall
    from psctl.errors import UsageError
    from psctl.launch.bench import bench_runs
    from psctl.launch.bench.congestion import controls_of
    from psctl.view.tables import draw_bench

    own, known = Context.of(context), _known(operation)
    if congestion is not None and operation != "pushpull":
        raise UsageError("--congestion: psctl's own connections are measured by pushpull", hint="psctl bench pushpull")
    bench_request = bench_runs.BenchRequest(
        known, bench_runs.sizes_of(sizes), bench_runs.strategies_of(strategy, known), workers, servers,
        controls_of(congestion),
    )  # fmt: skip
    call = BenchCall(own, own.cluster(cluster, lent=True), bench_request)
    code = call.run()
    own.print_result(call.document(), draw_bench)
    return code


def _known(text: str) -> Operation:
    """Return the operation of this name; raises UsageError."""
    from psctl.errors import UsageError
    from psctl.job.bench_messages import CollectiveOperation

    names = ("allreduce", "pushpull", *get_args(CollectiveOperation))
    if text not in names:
        raise UsageError(f"psctl bench {text}: unknown", hint=", ".join(names))
    return cast("Operation", text)
