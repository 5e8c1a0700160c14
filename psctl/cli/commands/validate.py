"""psctl validate: check cluster and job files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, print_json
from psctl.types import Document, JsonObject

if TYPE_CHECKING:
    from psctl.errors import PsctlError
    from psctl.view.console import Console


def validate(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Cluster and job files.", autocompletion=completion.files),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of both kinds of file, or of the kinds of FILE...")
    ] = False,
) -> None:
    """Check cluster and job files and the job's script.

    Every error is printed with line, column and the nearest valid name.

    \b
    Examples:
      psctl validate mine/job.yaml cluster.yaml
      psctl validate --schema
    """
    from psctl.errors import UsageError
    from psctl.spec.schema import cluster_schema, job_schema

    own = Context.of(context)
    if schema:
        kinds = {_kind(own, file) for file in files or []} or {"cluster", "job"}
        made = {"cluster": cluster_schema, "job": job_schema}
        print_json({kind: schema_of() for kind, schema_of in made.items() if kind in kinds})
        return
    if not files:
        raise UsageError("no file was given", hint="psctl validate job.yaml cluster.yaml, or --schema")
    rows = []
    first: PsctlError | None = None
    for file in files:
        row, error = _check(own, file)
        rows.append(row)
        if error is not None and len(files) > 1 and not own.options.machine:
            from psctl.view.failure import draw_error

            if first is not None:
                draw_error(own.err, first)
        first = error or first
    own.print_results({"files": rows}, _draw, first)


def _kind(own: Context, file: str) -> str:
    from psctl.spec.kinds import kind_of

    text, _ = own.read_file(file, "a cluster or job file")
    return kind_of(text, file)


def _check(own: Context, file: str) -> tuple[JsonObject, PsctlError | None]:
    from psctl.errors import PsctlError
    from psctl.spec.decode import raise_all
    from psctl.spec.kinds import kind_of

    kind = None
    try:
        text, path = own.read_file(file, "a cluster or job file")
        shown = file if Path(file).expanduser().is_file() else path
        kind = kind_of(text, shown)
        raise_all(_problems(kind, text, shown))
    except PsctlError as error:
        return {"file": file, "kind": kind, "valid": False, "error": error.document()["error"]}, error
    return {"file": file, "kind": kind, "valid": True, "error": None}, None


def _problems(kind: str, text: str, source: str) -> list[PsctlError]:
    """Return the errors of a file, and of the script that it names."""
    from psctl.errors import PsctlError
    from psctl.launch.files import data_sets
    from psctl.launch.jobs import script_entry
    from psctl.spec.job import JobSpec
    from psctl.spec.kinds import load

    found: list[PsctlError] = script_entry.problems(text, source) if kind == "job" else []
    try:
        spec = load(text, source)
        if isinstance(spec, JobSpec):
            found += data_sets.problems(text, spec)
    except PsctlError as error:
        found += [error, *error.others]
    return found


def _draw(console: Console, document: Document) -> None:
    from psctl.view.console import say

    for row in document["files"]:
        if row["valid"]:
            say(console, f"{row['file']}: valid {row['kind']} file")
