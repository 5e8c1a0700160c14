"""psctl init: make a folder with a job and a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context


def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to fill; created if missing.")] = Path("."),
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Job to copy: digits, char-gpt, resnet, minimal, ddp, store, ctr, l1-path.",
            autocompletion=completion.templates,
        ),
    ] = "digits",
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="a,b,c",
            help="Hosts to train on, as ssh names them.",
            autocompletion=completion.hosts,
        ),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option("--from-hostfile", metavar="F", help="Take the hosts from an MPI or DeepSpeed hostfile."),
    ] = None,
) -> None:
    """Copy a job template and a cluster file into DIR. Nothing is overwritten without --yes.

    \b
    Examples:
      psctl init mine
      psctl init mine --template ddp
    """
    from psctl.launch import scaffold
    from psctl.view.tables import draw_fields

    own = Context.of(context)
    text = scaffold.cluster_text(hosts, own.read_file(hostfile, "a hostfile") if hostfile else None)
    files = scaffold.plan_files(folder, template, text)
    present = [path for path in files if path.exists()]
    if present:
        shown = ", ".join(str(path) for path in present[:4])
        own.confirm(f"{shown} {'is' if len(present) == 1 else 'are'} there already: overwrite")
    scaffold.write(files)
    job = folder / "job.yaml"
    own.print_result(
        {"folder": str(folder.absolute()), "template": template, "files": [str(path) for path in files]},
        lambda console, made: draw_fields(console, dict.fromkeys(made["files"], "written")),
    )
    if text is None:
        own.tell(f"next: psctl train {job}     (on this machine; hosts go into {folder / 'cluster.yaml'})")
    else:
        own.tell(f"next: psctl doctor {folder / 'cluster.yaml'}", f"then: psctl train {job}")
