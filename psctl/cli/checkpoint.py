"""psctl checkpoint: list, show, verify, restore, export, pull, prune."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psctl.cli.context import Context

if TYPE_CHECKING:
    from psctl.launch.home import JobRecord
    from psctl.remote.shell import Shell

VERB = typer.Typer(
    help="List, show, verify, restore, export, pull and prune checkpoints.", no_args_is_help=True, rich_markup_mode=None
)

Reference = Annotated[str, typer.Argument(metavar="JOB@STEP", help="digits-3@500, digits-3@latest, digits@best.")]


@VERB.command("list")
def list_(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(help="A job, or a name for all its runs; nothing: all jobs.")] = None,
) -> None:
    """List checkpoints, oldest first, torn ones marked."""
    from psctl.launch import checkpoints
    from psctl.view.tables import draw_checkpoints

    own: Context = context.obj
    records = own.home.jobs()
    if job is not None:
        exact = own.home.job(job)
        records = [record for record in records if record.job == job] or [r for r in records if r.name == exact.name]
    rows = checkpoints.list_all(own.home, records, own.connect)
    own.result({"checkpoints": rows}, draw_checkpoints)


@VERB.command()
def show(context: typer.Context, checkpoint: Reference) -> None:
    """Show what a checkpoint holds."""
    from psctl.launch import checkpoints

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoints.locate(shell, record, which)
    own.result(found.brief, _draw_brief)


@VERB.command()
def verify(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(metavar="JOB@STEP|PATH", help="A checkpoint, or a folder that holds one.")
    ],
) -> None:
    """Read every byte of a checkpoint and compare it with its manifest."""
    from psctl import errors
    from psctl.launch import checkpoints
    from psctl.view.tables import draw_checkpoints

    own: Context = context.obj
    if "/" in checkpoint or Path(checkpoint).is_dir():
        row = _verify_here(Path(checkpoint))
    else:
        record, which = _record(own, checkpoint)
        with _head_shell(own, record) as shell:
            row = checkpoints.examine(shell, record, which)
    failure: errors.PsctlError | None = None
    if row["problems"]:
        kind = errors.CheckpointCorrupt if row["complete"] else errors.CheckpointIncomplete
        hint = "psctl checkpoint list shows the others"
        failure = kind(f"{row['id']}: {row['problems'][0]}", hint=hint, where=str(row["id"]))
    own.results({"checkpoints": [row]}, draw_checkpoints, failure)


@VERB.command()
def restore(
    context: typer.Context,
    checkpoint: Reference,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Cluster file or name.")] = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers, any.")] = None,
    servers: Annotated[str | None, typer.Option("--servers", metavar="N", help="Number of servers, any.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", metavar="NAME", help="Way to synchronise.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB.yaml", help="Another job file and its folder, not the saved ones."),
    ] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Start it, print its name, and leave.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
    on_interrupt: Annotated[
        str | None, typer.Option("--on-interrupt", metavar="detach|stop", help="What the first Ctrl-C does.")
    ] = None,
) -> int:
    """Verify a checkpoint, then go on from it as a new job, on any number of workers and servers."""
    from psctl.cli import launching
    from psctl.launch import checkpoints
    from psctl.launch.prepare import load_wanted

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    own.progress("", f"verifying {checkpoint}")
    found = checkpoints.find(own.home, record, which, own.connect)
    given = launching.overrides(workers, servers, strategy, settings or [])
    if job is not None:
        text, source = own.cwd_file(job, "a job file")
        wanted, code = load_wanted(text, source, given, []), None
    else:
        wanted, code = load_wanted(found.brief["job_file"], record.job_source, given, []), found.brief["code_hash"]
    run = launching.Run(own, wanted, own.cluster(cluster), code)
    if dry_run:
        run.dry()
        return 0
    return run.go(located=found, detach=detach, on_interrupt=on_interrupt)


@VERB.command()
def export(
    context: typer.Context,
    checkpoint: Reference,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, such as model.safetensors.")],
) -> None:
    """Write the model of a checkpoint as one safetensors file with the model's own names."""
    from psctl.launch import checkpoints
    from psctl.view.tables import draw_fields

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoints.locate(shell, record, which)
        size = checkpoints.export(shell, found, out)
    own.result({"id": found.id, "path": str(out.absolute()), "bytes": size}, draw_fields)


@VERB.command()
def pull(
    context: typer.Context,
    checkpoint: Reference,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets a folder JOB@STEP in it.")],
) -> None:
    """Bring a checkpoint to this machine, proved."""
    from psctl.launch import checkpoints
    from psctl.view.tables import draw_fields

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoints.locate(shell, record, which)
        target = checkpoints.pull(shell, found, folder)
    own.result({"id": found.id, "path": str(target.absolute()), "bytes": found.brief["bytes"]}, draw_fields)


@VERB.command()
def prune(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job, such as digits-3.")],
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Newest checkpoints that stay.")],
) -> None:
    """Remove a job's older checkpoints; the best one stays too."""
    from psctl.launch import checkpoints
    from psctl.view.tables import draw_checkpoints

    own: Context = context.obj
    record = own.home.job(job)
    own.confirm(f"remove all checkpoints of {record.job} but the newest {keep} and the best", asked_for=True)
    with _head_shell(own, record) as shell:
        rows = checkpoints.prune(shell, record, keep)
    own.result({"checkpoints": rows}, draw_checkpoints)


def _record(own: Context, reference: str) -> tuple[JobRecord, str]:
    from psctl.launch import checkpoints

    job, which = checkpoints.split(reference)
    return own.home.job(job), which


@contextmanager
def _head_shell(own: Context, record: JobRecord) -> Iterator[Shell]:
    """Give a shell on the host that keeps a job's checkpoints; raises what keeps us from there."""
    from psctl.words import HostName

    with own.connect(own.cluster_of(record), [record.head.name]) as fleet:
        for error in fleet.failed.values():
            raise error
        yield fleet.shells[HostName(record.head.name)]


def _verify_here(folder: Path) -> dict[str, Any]:
    from psctl import errors
    from psctl.checkpoint import tool

    if not folder.is_dir():
        raise errors.NoSuchCheckpoint(f"{folder}: there is no such folder", hint="psctl checkpoint list")
    return tool.verify({"folder": str(folder.absolute())})


def _draw_brief(console: Any, brief: Any) -> None:
    from psctl.units import format_bytes
    from psctl.view.tables import draw_fields
    from psctl.view.text import date_time, number

    metrics = " ".join(f"{name}={number(value)}" for name, value in brief["metrics"].items())
    draw_fields(console, {
        "checkpoint": brief["id"], "written": date_time(brief["time"]), "step": brief["step"], "epoch": brief["epoch"],
        "size": format_bytes(brief["bytes"]), "folder": brief["folder"], "metrics": metrics,
        "workers": brief["world"], "servers": brief["servers"], "strategy": brief["strategy"],
        "optimizer on": brief["update"], "seed": brief["seed"], "psctl": brief["version"], "code": brief["code_hash"],
        "tensors": len(brief["tensors"]), "continue": f"psctl checkpoint restore {brief['id']}",
    })  # fmt: skip
