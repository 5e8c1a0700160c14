"""psctl topo: the machines and what joins them."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.context import Context


def topo(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Cluster file or name; nothing: the current.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Not in this version.")] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Not in this version.")] = False,
    from_: Annotated[str | None, typer.Option("--from", metavar="DIR|FILE", help="Not in this version.")] = None,
) -> None:
    """Show the CPUs, memory, NICs and GPUs of every host, and which strategy suits them."""
    from psctl.errors import NotInThisVersion
    from psctl.launch import survey
    from psctl.launch.converge import look_at_all, verdict
    from psctl.view.topo import draw_topo

    own: Context = context.obj
    for given, name in ((measure, "--measure"), (matrix, "--matrix"), (from_ is not None, "--from")):
        if given:
            raise NotInThisVersion(f"topo {name}")
    chosen = own.cluster(cluster)
    with own.connect(chosen) as fleet:
        state = look_at_all(chosen, fleet)
    for name in state.sites:
        state.failed.pop(name, None)  # looking needs no room on the disk
    document = survey.topology(chosen, state) if state.sites else {"hosts": [], "between": [], "strategy": None}
    own.results(document, draw_topo, verdict(state.failed, len(chosen.spec.hosts), "seen"))


VERB = topo
