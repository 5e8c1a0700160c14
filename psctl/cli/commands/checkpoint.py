"""psctl checkpoint: list, show, verify, restore, export, pull, prune."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import (
    CheckpointArgument,
    ClusterOption,
    DetachOption,
    DryRunOption,
    OnInterruptOption,
    ServersOption,
    SettingsOption,
    StrategyOption,
    WorkersOption,
)
from psctl.types import Document

if TYPE_CHECKING:
    from psctl.checkpoint.catalog import CheckpointRow
    from psctl.launch.checkpoints.checkpoint_actions import LocatedCheckpoint
    from psctl.launch.home import JobRecord
    from psctl.launch.jobs.prepare import Resumable
    from psctl.remote.shell import Shell
    from psctl.view.console import Console


class ExportFormat(StrEnum):
    """What `checkpoint export` writes."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"


checkpoint = typer.Typer(
    name="checkpoint",
    help="List, show, verify, restore, export, pull, prune checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@checkpoint.command("list")
def list_(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            help="A job, a name for all its runs, or the URL of checkpoint.to; without it all jobs.",
            autocompletion=completion.jobs,
        ),
    ] = None,
) -> None:
    """List checkpoints, oldest first; mark torn ones.

    \b
    Examples:
      psctl checkpoint list
      psctl checkpoint list digits-3
      psctl checkpoint list s3://bucket/folder
    """
    from psctl.errors import Partial
    from psctl.launch.checkpoints import target_actions
    from psctl.launch.checkpoints.checkpoint_listing import list_all
    from psctl.view.tables import draw_checkpoints

    own = Context.of(context)
    if job is not None and target_actions.is_target(job):
        own.print_results({"checkpoints": target_actions.list_at(job)}, draw_checkpoints, None)
        return
    records = own.home.jobs()
    if job is not None:
        exact = own.home.job(job)
        records = [record for record in records if record.job == job] or [r for r in records if r.name == exact.name]
    listed = list_all(own.home, records, own.connect)
    for note in listed.notes:
        own.warn(note)
    for record in records:
        if record.job not in listed.missing:
            own.home.save_steps(record.job, {row["step"] for row in listed.rows if row["job"] == record.job})
    if listed.missing and len(listed.missing) == len(records):
        raise next(iter(listed.missing.values()))
    failure = None
    if listed.missing:
        name, error = next(iter(listed.missing.items()))
        text = f"the checkpoints of {', '.join(listed.missing)} are not listed: {error.message}"
        failure = Partial(text, hint=error.hint or "all other checkpoints are listed above", where=name)
    own.print_results({"checkpoints": listed.rows}, draw_checkpoints, failure)


@checkpoint.command()
def show(context: typer.Context, checkpoint: CheckpointArgument) -> None:
    """Show what a checkpoint holds.

    \b
    Examples:
      psctl checkpoint show digits-3@latest
    """
    from psctl.launch.checkpoints import target_actions
    from psctl.launch.checkpoints.checkpoint_listing import holders

    own = Context.of(context)
    if target_actions.is_target(checkpoint):
        at_url = target_actions.find(own.home, checkpoint)
        own.print_result(at_url.brief | {"hosts": [], "reference": at_url.reference}, _draw_brief)
        return
    with _located(own, checkpoint) as (_, found):
        hosts = holders(own.home, found.record, found.host.name, found.step, own.connect)
        own.print_result(found.brief | {"hosts": hosts}, _draw_brief)


@checkpoint.command()
def verify(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="JOB@STEP|PATH",
            help="A checkpoint (of checkpoint.to: URL/JOB@STEP), or a folder that holds one.",
            autocompletion=completion.checkpoints,
        ),
    ],
) -> None:
    """Compare every byte of a checkpoint with its manifest.

    \b
    Examples:
      psctl checkpoint verify digits-3@500
    """
    from psctl import errors
    from psctl.launch.checkpoints import checkpoint_actions, target_actions
    from psctl.view.tables import draw_checkpoints

    own = Context.of(context)
    if target_actions.is_target(checkpoint):
        row = target_actions.verify_at(own.home, checkpoint)
    elif "/" in checkpoint or Path(checkpoint).is_dir():
        row = _verify_here(own, Path(checkpoint))
    else:
        record, which = _record(own, checkpoint)
        with own.head_shell(record) as (shell, record):
            row = checkpoint_actions.examine(shell, record, which)
    failure: errors.PsctlError | None = None
    if problems := row.get("problems"):
        kind = errors.CheckpointCorrupt if row["complete"] else errors.CheckpointIncomplete
        hint = "psctl checkpoint list shows the others"
        failure = kind(f"{row['id']}: {problems[0]}", hint=hint, where=row["id"])
    own.print_results({"checkpoints": [row]}, draw_checkpoints, failure)


@checkpoint.command()
def restore(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    cluster: ClusterOption = None,
    workers: WorkersOption = None,
    servers: ServersOption = None,
    strategy: StrategyOption = None,
    settings: SettingsOption = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB.yaml", help="Another job file and its folder in place of the saved ones."),
    ] = None,
    trust_manifest: Annotated[
        bool,
        typer.Option(
            "--trust-manifest",
            help="Run the job file and code of the checkpoint even if this machine recorded others.",
        ),
    ] = False,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    on_interrupt: OnInterruptOption = None,
) -> int:
    """Verify a checkpoint, then continue from it as a new job.

    The new job may have other numbers of workers and servers.

    \b
    Examples:
      psctl checkpoint restore digits-3@best
      psctl checkpoint restore digits-3@latest --cluster lab --workers 8
      psctl checkpoint restore s3://bucket/folder/digits-3@latest --job job.yaml
    """
    from psctl.cli.shared import launching
    from psctl.launch.checkpoints import manifest_trust
    from psctl.launch.jobs.prepare import load_requested_job

    own = Context.of(context)
    found, record = _to_restore(own, checkpoint, job)
    given = launching.overrides(workers, servers, strategy, settings)
    if job is not None or record is None:
        text, source = own.read_file(str(job), "a job file")
        wanted, code = load_requested_job(text, source, given, []), None
    else:
        name = found.id
        runs = manifest_trust.source_of(record, found.manifest, lambda lines: _agree(own, name, lines, trust_manifest))
        wanted, code = load_requested_job(runs.job_file, record.job_source, given, []), runs.code
        if not runs.own:
            manifest_trust.refuse_shell(wanted.job, wanted.env, found.id)
    launch = launching.JobLaunch(own, wanted, own.cluster(cluster, submits=not dry_run), code)
    if dry_run:
        launch.print_dry_run()
        return 0
    return launch.run(located=found, detach=detach, on_interrupt=on_interrupt)


@checkpoint.command()
def export(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write, such as model.safetensors; with dcp a new folder.")
    ],
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: the model in one file. dcp: model and optimizer for torch.distributed.checkpoint.",
        ),
    ] = ExportFormat.SAFETENSORS,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="STORE",
            show_default=False,
            help="Write the rows of integer keys of this store instead: keys and rows, or OUT.parquet.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint's model in another format.

    As one safetensors file, or with its optimizer for torch.distributed.checkpoint. Tensors have the model's own names.

    \b
    Examples:
      psctl checkpoint export digits-3@best model.safetensors
      psctl checkpoint export ctr-1@latest rows.safetensors --table default
      psctl checkpoint export digits-3@latest ./saved --format dcp
      psctl checkpoint export s3://bucket/folder/digits-3@best model.safetensors
    """
    from psctl.launch.checkpoints import checkpoint_actions, target_actions
    from psctl.view.tables import draw_fields

    own = Context.of(context)
    rows: int | None = None
    if target_actions.is_target(checkpoint):
        at_url = target_actions.find(own.home, checkpoint)
        name = at_url.id
        if table is not None:
            rows, size = target_actions.export_rows(at_url, table, out)
        else:
            size = (target_actions.export_dcp if format_ is ExportFormat.DCP else target_actions.export)(at_url, out)
    else:
        with _located(own, checkpoint) as (shell, found):
            name = found.id
            if table is not None:
                rows, size = checkpoint_actions.export_rows(shell, found, table, out)
            else:
                act = checkpoint_actions.export_dcp if format_ is ExportFormat.DCP else checkpoint_actions.export
                size = act(shell, found, out)
    document = {"id": name, "path": str(out.absolute()), "bytes": size}
    own.print_result(document if rows is None else {**document, "rows": rows}, draw_fields)


@checkpoint.command()
def pull(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder in which to create JOB@STEP.")],
) -> None:
    """Copy a checkpoint to this machine and verify it.

    \b
    Examples:
      psctl checkpoint pull digits-3@latest ./saved
      psctl checkpoint pull s3://bucket/folder/digits-3@latest ./saved
    """
    from psctl.launch.checkpoints import checkpoint_actions, target_actions
    from psctl.view.tables import draw_fields

    own = Context.of(context)
    if target_actions.is_target(checkpoint):
        target, size = target_actions.pull_from(own.home, checkpoint, folder)
        own.print_result({"id": target.name, "path": str(target.absolute()), "bytes": size}, draw_fields)
        return
    with _located(own, checkpoint) as (shell, found):
        target = checkpoint_actions.pull(shell, found, folder)
    own.print_result({"id": found.id, "path": str(target.absolute()), "bytes": found.manifest.bytes}, draw_fields)


@checkpoint.command()
def prune(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(help="The job, such as digits-3; of checkpoint.to: URL/JOB.", autocompletion=completion.jobs),
    ],
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Number of newest checkpoints to keep.")],
) -> None:
    """Remove a job's older checkpoints; keep the best one too.

    \b
    Examples:
      psctl checkpoint prune digits-3 --keep 2
      psctl checkpoint prune s3://bucket/folder/digits-3 --keep 2
    """
    from psctl.launch.checkpoints import checkpoint_actions, target_actions
    from psctl.launch.checkpoints.checkpoint_listing import rows_on
    from psctl.view.tables import draw_pruned

    own = Context.of(context)
    if target_actions.is_target(job):
        plan = target_actions.to_prune(own.home, job, keep)
        if plan.removed:
            names = ", ".join(f"{each.job}@{each.step}" for each in plan.removed)
            own.confirm(f"remove {len(plan.removed)} of {plan.job}'s checkpoints at {plan.target.target}: {names}")
            plan.act()
        own.print_result(plan.document, draw_pruned)
        return
    record = own.home.job(job)
    with own.head_shell(record, acts=True) as (shell, record):
        removed = checkpoint_actions.to_prune(shell, record, keep)
        if removed:
            own.confirm(f"remove {len(removed)} of {record.job}'s checkpoints: {', '.join(removed)}")
        rows = checkpoint_actions.prune(shell, record, keep) if removed else []
        kept = rows_on(shell, record.head, record)
    copies = _prune_copies(own, record, keep) if removed else {}
    result = {"job": record.job, "host": record.head.name, "checkpoints": rows, "kept": kept, "copies": copies}
    own.print_result(result, draw_pruned)


def _prune_copies(own: Context, record: JobRecord, keep: int) -> dict[str, list[int]]:
    """Remove copies on the job's other hosts; return the removed steps by host."""
    from psctl.launch.checkpoints import checkpoint_actions

    others = [host.name for host in record.hosts if host is not record.head]
    if not others:
        return {}
    with own.connect(own.cluster_of(record), others) as fleet:
        removed, failed = checkpoint_actions.prune_copies(fleet, record, keep)
    for host, message in failed.items():
        own.warn(f"the copies on {host} were not removed: {message}")
    return removed


def _record(own: Context, reference: str) -> tuple[JobRecord, str]:
    from psctl.launch.checkpoints import checkpoint_actions

    job, which = checkpoint_actions.split(reference)
    return own.home.job(job), which


def _to_restore(own: Context, reference: str, job: str | None) -> tuple[Resumable, JobRecord | None]:
    """Return a checkpoint and this machine's record of its job; there is one unless a job file is given."""
    from psctl import errors
    from psctl.cli.shared import launching
    from psctl.launch.checkpoints import checkpoint_actions, target_actions

    with own.working(f"verifying {reference}"):
        if not target_actions.is_target(reference):
            record, which = _record(own, reference)
            return checkpoint_actions.find(own.home, record, which, own.connect), record
        found = launching.find_at_target(own, reference)
    if found.record is None and job is None:
        raise errors.UsageError(
            f"this machine did not start {found.manifest.job}: it does not know which job file and code are that job's",
            hint=f"psctl checkpoint restore {reference} --job JOB.yaml",
            where=reference,
        )
    return found, found.record


@contextlib.contextmanager
def _located(own: Context, reference: str) -> Iterator[tuple[Shell, LocatedCheckpoint]]:
    """Give a checkpoint and a shell on a host that holds it: the job's head, or where a copy is."""
    from psctl.launch.checkpoints import checkpoint_actions

    record, which = _record(own, reference)
    with checkpoint_actions.reached(own.home, record, which, own.connect) as reached:
        if reached[1].host.name != record.hosts[record.leader].name:
            own.warn(f"{reached[1].id}: this is the copy on {reached[1].host.name}")
        yield reached


def _verify_here(own: Context, folder: Path) -> CheckpointRow:
    from psctl import errors
    from psctl.checkpoint.catalog import read_entry
    from psctl.checkpoint.reader import manifest_bytes, verify
    from psctl.launch.checkpoints import manifest_trust

    if not folder.is_dir():
        raise errors.NoSuchCheckpoint(f"{folder}: there is no such folder", hint="psctl checkpoint list")
    problems, found = verify(folder.absolute()), read_entry(folder.absolute())
    if not found.job or found.problem:
        return {**found.verified_row(problems), "signed": "none"}
    record = next((each for each in own.home.jobs() if each.job == found.job), None)
    data = manifest_bytes(folder)
    wrong = manifest_trust.fault(record, data)
    problems = [*problems, *([wrong] if wrong else [])]
    return {**found.verified_row(problems), "signed": manifest_trust.signer(record, data)}


def _agree(own: Context, checkpoint: str, lines: list[str], trusted: bool) -> bool:
    """Print how a manifest differs from this machine's record of the job, and ask; --yes is no answer to this."""
    from psctl.view.console import say
    from psctl.view.text import one_line

    job = checkpoint.partition("@")[0]
    say(own.err, f"{checkpoint} names another job file or code than {job} was started with:")
    say(own.err, *(f"  {one_line(line)}" for line in lines))
    return trusted or own.ask(
        "run the job file and code that the checkpoint names",
        hint="--job JOB.yaml runs a job file of this machine; --trust-manifest runs the checkpoint's",
    )


def _draw_brief(console: Console, brief: Document) -> None:
    from psctl.units import format_bytes
    from psctl.view.tables import SIGNED, draw_fields
    from psctl.view.text import date_time, number

    metrics = " ".join(f"{name}={number(value)}" for name, value in brief["metrics"].items())
    size = format_bytes(brief["bytes"])
    if brief["earlier_steps"]:
        steps = ", ".join(map(str, brief["earlier_steps"]))
        size += f", of which {format_bytes(brief['written'])} was written; the rest is linked from step {steps}"
    draw_fields(console, {
        "checkpoint": brief["id"], "written": date_time(brief["time"]), "step": brief["step"], "epoch": brief["epoch"],
        "size": size, "folder": brief["folder"], "hosts": ", ".join(brief["hosts"]),
        "metrics": metrics,
        "workers": brief["world"], "servers": brief["servers"], "strategy": brief["strategy"],
        "optimizer on": brief["update"], "seed": brief["seed"], "psctl": brief["version"], "code": brief["code_hash"],
        "tensors": len(brief["tensors"]), "signature": SIGNED[brief["signed"]],
        "continue": f"psctl checkpoint restore {brief.get('reference') or brief['id']}",
    })  # fmt: skip
