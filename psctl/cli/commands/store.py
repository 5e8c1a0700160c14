"""psctl store: read keys of a running job's store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psctl.cli.shared.context import Context
from psctl.cli.shared.parameters import RunningJobArgument


def store(
    context: typer.Context,
    job: RunningJobArgument,
    keys: Annotated[
        list[str] | None, typer.Argument(help="Names or integers; without them a list of the keys.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option("--store", metavar="NAME", help="Name of the store in run.store().")] = "default",
    file: Annotated[Path | None, typer.Option("--keys", metavar="FILE", help="More keys, one a line.")] = None,
) -> None:
    """Read keys of a running job's run.store(). Change nothing and delay no worker.

    \b
    Examples:
      psctl store counts
      psctl store counts 17 42
    """
    import msgspec

    from psctl.clock import SystemClock
    from psctl.errors import UsageError
    from psctl.launch.jobs.store_query import StoreReader, over
    from psctl.view.tables import draw_store

    own = Context.of(context)
    record = own.home.job(job)
    if record.over:
        raise over(record)
    words = list(keys or [])
    if file is not None:
        try:
            words += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: the keys could not be read: {error}", hint="one key a line, UTF-8") from error
    wanted = [_key(word) for word in words]
    if file is not None and not wanted:
        raise UsageError(f"{file} has no keys", hint="one key a line")
    with own.head_shell(record) as (shell, record):
        found = StoreReader(shell, record, name, SystemClock()).read(wanted)
    own.print_result(msgspec.to_builtins(found), draw_store)


def _key(word: str) -> str | int:
    """Return a key of the command line: an integer where it is written as one, else a name."""
    from psctl.errors import UsageError

    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return word
    if len(digits) > 19 or not -(1 << 63) <= int(word) < 1 << 63:
        raise UsageError(f"{word}: an integer key has 64 bits with sign", hint="psctl store --help")
    return int(word)
