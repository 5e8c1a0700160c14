"""The file that a command writes: named by -o, whole or absent."""

from __future__ import annotations

from pathlib import Path

from psctl.cli.shared.global_options import FORMATS, PICTURES
from psctl.errors import UsageError


def output_file(given: Path | None, otherwise: str) -> Path:
    """Return the file to write.

    Args:
        given: the value of -o; None: it was not given.
        otherwise: the file's name then.

    Raises:
        UsageError: it is a format of --output, or it cannot be written there.
    """
    target = given if given is not None else Path(otherwise)
    if str(target) in (*FORMATS, *PICTURES):
        hint = f"-o {otherwise}, or --output {target} for the format of the result"
        raise UsageError(f"-o {target}: here -o names the file to write", hint=hint)
    if target.is_dir():
        raise UsageError(f"{target} cannot be written: it is a folder", hint=f"-o {target / otherwise}")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no folder {target.parent}", hint=f"-o {otherwise}")
    return target


def write_whole(target: Path, data: bytes) -> None:
    """Write a file, or leave the former one.

    Raises:
        UsageError: it cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="-o names another file") from error
