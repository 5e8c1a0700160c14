"""psctl checkpoint: list, show, verify, restore, export, pull, prune."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context

if TYPE_CHECKING:
    from psctl.launch.checkpoints.checkpoint_actions import Located
    from psctl.launch.home import JobRecord
    from psctl.remote.shell import Shell

VERB = typer.Typer(
    help="List, show, verify, restore, export, pull and prune checkpoints.", no_args_is_help=True, rich_markup_mode=None
)

Reference = Annotated[
    str,
    typer.Argument(
        metavar="JOB@STEP", help="digits-3@500, digits-3@latest, digits@best.", autocompletion=completion.checkpoints
    ),
]


@VERB.command("list")
def list_(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="A job, or a name for all its runs; nothing: all jobs.", autocompletion=completion.jobs),
    ] = None,
) -> None:
    """List checkpoints, oldest first, torn ones marked."""
    from psctl.errors import Partial
    from psctl.launch.checkpoints.checkpoint_listing import list_all
    from psctl.view.tables import draw_checkpoints

    own: Context = context.obj
    records = own.home.jobs()
    if job is not None:
        exact = own.home.job(job)
        records = [record for record in records if record.job == job] or [r for r in records if r.name == exact.name]
    listed = list_all(own.home, records, own.connect)
    for note in listed.notes:
        own.warn(note)
    for record in records:
        if record.job not in listed.missing:
            own.home.note_steps(record.job, {int(row["step"]) for row in listed.rows if row["job"] == record.job})
    if listed.missing and len(listed.missing) == len(records):
        raise next(iter(listed.missing.values()))
    failure = None
    if listed.missing:
        name, error = next(iter(listed.missing.items()))
        text = f"the checkpoints of {', '.join(listed.missing)} are not listed: {error.message}"
        failure = Partial(text, hint=error.hint or "the others are above", where=name)
    own.results({"checkpoints": listed.rows}, draw_checkpoints, failure)


@VERB.command()
def show(context: typer.Context, checkpoint: Reference) -> None:
    """Show what a checkpoint holds."""
    from psctl.launch.checkpoints import checkpoint_actions

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoint_actions.locate(shell, record, which)
    own.result(found.brief, _draw_brief)


@VERB.command()
def verify(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="JOB@STEP|PATH",
            help="A checkpoint, or a folder that holds one.",
            autocompletion=completion.checkpoints,
        ),
    ],
) -> None:
    """Read every byte of a checkpoint and compare it with its manifest."""
    from psctl import errors
    from psctl.launch.checkpoints import checkpoint_actions
    from psctl.view.tables import draw_checkpoints

    own: Context = context.obj
    if "/" in checkpoint or Path(checkpoint).is_dir():
        row = _verify_here(own, Path(checkpoint))
    else:
        record, which = _record(own, checkpoint)
        with _head_shell(own, record) as shell:
            row = checkpoint_actions.examine(shell, record, which)
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
    cluster: completion.ClusterOption = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Number of workers, any.")] = None,
    servers: Annotated[str | None, typer.Option("--servers", metavar="N", help="Number of servers, any.")] = None,
    strategy: completion.StrategyOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB.yaml", help="Another job file and its folder, not the saved ones."),
    ] = None,
    trust_manifest: Annotated[
        bool,
        typer.Option(
            "--trust-manifest",
            help="Run the job file and code that the checkpoint names where this machine recorded others.",
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Start it, print its name, and leave.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
    on_interrupt: Annotated[
        str | None, typer.Option("--on-interrupt", metavar="detach|stop", help="What the first Ctrl-C does.")
    ] = None,
) -> int:
    """Verify a checkpoint, then go on from it as a new job, on any number of workers and servers."""
    from psctl.cli.shared import launching
    from psctl.launch.checkpoints import checkpoint_actions, manifest_trust
    from psctl.launch.jobs.prepare import load_wanted

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    own.progress("", f"verifying {checkpoint}")
    found = checkpoint_actions.find(own.home, record, which, own.connect)
    given = launching.overrides(workers, servers, strategy, settings or [])
    if job is not None:
        text, source = own.cwd_file(job, "a job file")
        wanted, code = load_wanted(text, source, given, []), None
    else:
        runs = manifest_trust.source_of(record, found.manifest, lambda lines: _agree(own, found, lines, trust_manifest))
        wanted, code = load_wanted(runs.job_file, record.job_source, given, []), runs.code
        if not runs.own:
            manifest_trust.refuse_shell(wanted.job, wanted.env, found.id)
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
    from psctl.launch.checkpoints import checkpoint_actions
    from psctl.view.tables import draw_fields

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoint_actions.locate(shell, record, which)
        size = checkpoint_actions.export(shell, found, out)
    own.result({"id": found.id, "path": str(out.absolute()), "bytes": size}, draw_fields)


@VERB.command()
def pull(
    context: typer.Context,
    checkpoint: Reference,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets a folder JOB@STEP in it.")],
) -> None:
    """Bring a checkpoint to this machine, proved."""
    from psctl.launch.checkpoints import checkpoint_actions
    from psctl.view.tables import draw_fields

    own: Context = context.obj
    record, which = _record(own, checkpoint)
    with _head_shell(own, record) as shell:
        found = checkpoint_actions.locate(shell, record, which)
        target = checkpoint_actions.pull(shell, found, folder)
    own.result({"id": found.id, "path": str(target.absolute()), "bytes": found.manifest.bytes}, draw_fields)


@VERB.command()
def prune(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job, such as digits-3.", autocompletion=completion.jobs)],
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Newest checkpoints that stay.")],
) -> None:
    """Remove a job's older checkpoints; the best one stays too."""
    from psctl.launch.checkpoints import checkpoint_actions
    from psctl.launch.checkpoints.checkpoint_listing import rows_of
    from psctl.view.tables import draw_pruned

    own: Context = context.obj
    record = own.home.job(job)
    with _head_shell(own, record, acts=True) as shell:
        doomed = checkpoint_actions.to_prune(shell, record, keep)
        if doomed:
            own.confirm(f"remove {len(doomed)} of {record.job}'s checkpoints: {', '.join(doomed)}")
        rows = checkpoint_actions.prune(shell, record, keep) if doomed else []
        kept = rows_of(shell, record.head, record)
    own.result({"job": record.job, "host": record.head.name, "checkpoints": rows, "kept": kept}, draw_pruned)
    if rows and len(record.hosts) > 1:
        own.tell("copies that the job's other hosts keep were not removed")


def _record(own: Context, reference: str) -> tuple[JobRecord, str]:
    from psctl.launch.checkpoints import checkpoint_actions

    job, which = checkpoint_actions.split(reference)
    return own.home.job(job), which


@contextmanager
def _head_shell(own: Context, record: JobRecord, *, acts: bool = False) -> Iterator[Shell]:
    """Give a shell on the host that keeps a job's checkpoints; raises what keeps us from there."""
    from psctl.types import HostName

    with own.connect(own.cluster_of(record, acts=acts), [record.head.name]) as fleet:
        for error in fleet.failed.values():
            raise error
        yield fleet.shells[HostName(record.head.name)]


def _verify_here(own: Context, folder: Path) -> dict[str, Any]:
    from psctl import errors
    from psctl.checkpoint import files, tool
    from psctl.launch.checkpoints import manifest_trust

    if not folder.is_dir():
        raise errors.NoSuchCheckpoint(f"{folder}: there is no such folder", hint="psctl checkpoint list")
    row = tool.verify({"folder": str(folder.absolute())})
    if not row["job"] or not row["complete"]:
        return {**row, "signed": "none"}
    record = next((each for each in own.home.jobs() if each.job == row["job"]), None)
    data = files.manifest_bytes(folder)
    wrong = manifest_trust.fault(record, data)
    problems = [*row["problems"], *([wrong] if wrong else [])]
    return {**row, "verified": not problems, "problems": problems, "signed": manifest_trust.signer(record, data)}


def _agree(own: Context, found: Located, lines: list[str], trusted: bool) -> bool:
    """Show in what a manifest differs from this machine's record of the job, and ask; --yes is no answer to that."""
    from psctl.view.console import say
    from psctl.view.text import one_line

    say(own.err, f"{found.id} names another job file or code than {found.record.job} was started with:")
    say(own.err, *(f"  {one_line(line)}" for line in lines))
    return trusted or own.agreed(
        "run the job file and code that the checkpoint names",
        hint="--job JOB.yaml runs a job file of this machine; --trust-manifest takes the checkpoint's",
    )


def _draw_brief(console: Any, brief: Any) -> None:
    from psctl.units import format_bytes
    from psctl.view.tables import SIGNED, draw_fields
    from psctl.view.text import date_time, number

    metrics = " ".join(f"{name}={number(value)}" for name, value in brief["metrics"].items())
    draw_fields(console, {
        "checkpoint": brief["id"], "written": date_time(brief["time"]), "step": brief["step"], "epoch": brief["epoch"],
        "size": format_bytes(brief["bytes"]), "folder": brief["folder"], "metrics": metrics,
        "workers": brief["world"], "servers": brief["servers"], "strategy": brief["strategy"],
        "optimizer on": brief["update"], "seed": brief["seed"], "psctl": brief["version"], "code": brief["code_hash"],
        "tensors": len(brief["tensors"]), "signature": SIGNED[brief["signed"]],
        "continue": f"psctl checkpoint restore {brief['id']}",
    })  # fmt: skip
