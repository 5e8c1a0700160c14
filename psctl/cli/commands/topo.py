"""psctl topo: show machines and links."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.cli.shared.context import Context, ReportedError
from psctl.cli.shared.global_options import PICTURES
from psctl.cli.shared.parameters import ClusterArgument

if TYPE_CHECKING:
    from psctl.errors import PsctlError
    from psctl.launch.measure.link_measurement import Measurements
    from psctl.topology.host.document import ClusterDocument


def topo(
    context: typer.Context,
    cluster: ClusterArgument = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the links between hosts and between GPUs, and keep the result.")
    ] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Print each machine's matrix instead of its tree.")] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR|FILE",
            help="Read saved output (nvidia-smi topo -m and others, or topo -o json) and contact no host.",
        ),
    ] = None,
) -> None:
    """Show devices, links and rates of the hosts. Suggest the strategy that suits them.

    \b
    Examples:
      psctl topo
      psctl topo lab --measure
      psctl topo lab -o svg
    """
    from psctl.errors import UsageError

    own = Context.of(context)
    if from_ is not None and (cluster is not None or measure):
        other = "--measure" if measure else "a cluster"
        raise UsageError(f"--from reads saved output and cannot be combined with {other}", hint="give one of them")
    if matrix and own.options.output in PICTURES:
        raise UsageError(f"--matrix is drawn with -o table; -o {own.options.output} is a picture", hint="leave one out")
    if from_ is not None:
        from psctl.launch.measure.topology_document import saved_topology

        _show(own, saved_topology(from_), matrix, None)
    else:
        _show_live(own, cluster, measure, matrix)


def _show_live(own: Context, cluster: str | None, measure: bool, matrix: bool) -> None:
    """Probe the hosts and show them."""
    from psctl.launch.hosts.converge import inspect, verdict
    from psctl.launch.measure import survey

    chosen = own.cluster(cluster, lent=True)
    with inspect(own.home, chosen, own.connect) as reached:
        for name in reached.sites:
            reached.failed.pop(name, None)  # a probe needs no space on the disk
        known: Measurements | None = None
        if reached.sites:
            known, odd = (survey.measured_links if measure else survey.known_links)(reached, own.progress)
            for line in odd:
                own.warn(line)
        document = survey.topology(reached, known)
    _show(own, document, matrix, verdict(reached.failed, len(chosen.spec.hosts), "seen"))


def _show(own: Context, document: ClusterDocument, matrix: bool, error: PsctlError | None) -> None:
    """Print or draw the document. Raises `error` in place of a picture in which every host failed."""
    if own.options.output not in PICTURES:
        from psctl.view.topo import draw_topo

        own.print_results(document, lambda console, shown: draw_topo(console, shown, matrix), error)
        return
    if error is not None and all(host.get("error") for host in document["hosts"]):
        raise error
    if own.options.output == "dot":
        from psctl.view.pictures.dot import dot as draw
    else:
        from psctl.view.pictures.svg import svg as draw
    sys.stdout.flush()
    sys.stdout.buffer.write(draw(document).encode())
    if error is not None:
        raise ReportedError(error)
