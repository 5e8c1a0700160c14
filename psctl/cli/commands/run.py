"""psctl run: run a command on all hosts of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, print_json


def run(
    context: typer.Context,
    cluster: Annotated[
        str, typer.Argument(help="Cluster file or name; local: this machine.", autocompletion=completion.clusters)
    ],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
) -> None:
    """Run a command on all hosts of a cluster.

    It runs on all at once, in the home folders there. Each line of its output comes after the host's name. No shell
    reads the command on the way: for one, run `sh -c "..."`. Ctrl-C ends it on all hosts.

    \b
    Examples:
      psctl run lab -- nvidia-smi -L
      psctl run lab -- sh -c "df -h /data | tail -1"
    """
    import msgspec

    from psctl.launch.hosts.converge import verdict
    from psctl.launch.hosts.run_command import run_everywhere
    from psctl.view.console import Glyphs, rank_lines, say

    own = Context.of(context)
    chosen = own.cluster(cluster, lent=True)
    glyphs, held = Glyphs(own.out), []

    def take(host: str, line: str) -> None:
        if own.options.output == "json":
            held.append({"host": host, "text": line})
        elif own.options.machine:
            print_json({"event": "log", "host": host, "text": line})
        else:
            say(own.out, *rank_lines(host, "", line, glyphs))

    with own.connect(chosen) as fleet:
        results, failed = run_everywhere(fleet, command, take)
    document = {"cluster": chosen.spec.name, "hosts": msgspec.to_builtins(results)}
    if own.options.output == "json":
        document["lines"] = held
    own.print_results(document, lambda _console, _document: None, verdict(failed, len(results), "done"))
