"""Calls of the checkpoint tool on a host (psctl.checkpoint.tool); answers are decoded into types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from psctl import errors
from psctl.checkpoint.reader import folder_name
from psctl.launch.home import HostRecord
from psctl.remote.shell import Shell

A = TypeVar("A")

_KINDS: dict[str, type[errors.PsctlError]] = {
    kind.code: kind
    for kind in (
        errors.NoSuchCheckpoint, errors.CheckpointIncomplete, errors.CheckpointCorrupt, errors.DiskFull,
        errors.UsageError, errors.VersionMismatch, errors.PythonMissing,
    )
}  # fmt: skip


class _Said(msgspec.Struct):
    """An error as a host's tool reports it."""

    code: str
    message: str
    hint: str = ""
    where: str = ""


class _Refusal(msgspec.Struct):
    error: _Said


class CheckpointRow(msgspec.Struct):
    """A row of `checkpoint list` as a host's tool reports it."""

    job: str
    step: int
    time: float
    bytes: int
    complete: bool
    metrics: dict[str, float | None]
    folder: str = ""
    problem: str = ""


class ListAnswer(msgspec.Struct):
    """Answer to `list`."""

    checkpoints: list[CheckpointRow]


class NewestAnswer(msgspec.Struct):
    """Answer to `newest`; None: the job has no sound one."""

    step: int | None
    skipped: list[str]


class ShowAnswer(msgspec.Struct):
    """Answer to `show`, as far as it is used: all else is read from the manifest."""

    step: int


class VerifyAnswer(CheckpointRow, kw_only=True):
    """Answer to `verify`."""

    verified: bool
    problems: list[str]


class ExportAnswer(msgspec.Struct):
    """Answer to `export`."""

    bytes: int


class PruneAnswer(msgspec.Struct):
    """Answer to `prune`."""

    removed: list[CheckpointRow]


class AdoptAnswer(msgspec.Struct):
    """Answer to `adopt`."""

    folder: str


def question(shell: Shell, host: HostRecord, verb: str, body: dict[str, Any], kind: type[A]) -> A:
    """Call the checkpoint tool on a host; its errors are raised unchanged.

    Args:
        shell, host: the host.
        verb, body: the question.
        kind: what the answer must be.

    Raises:
        CommandFailed: the answer is none.
    """
    program = ["env", f"PYTHONPATH={host.code}", host.python, "-m", "psctl.checkpoint.tool", verb, json.dumps(body)]
    result = shell.run(program, check=False, timeout=None)
    try:
        if result.status == 0:
            return msgspec.json.decode(result.stdout, type=kind)
        said = msgspec.json.decode(result.stdout, type=_Refusal).error
    except (msgspec.DecodeError, RecursionError):
        tail = (result.stderr or result.stdout).decode(errors="replace")
        raise errors.CommandFailed(shell.name, f"psctl.checkpoint.tool {verb}", result.status, tail) from None
    raise _KINDS.get(said.code, errors.PsctlError)(said.message, said.hint, said.where)


def folder_on(host: HostRecord, job: str, step: int) -> str:
    """Return the folder of a checkpoint on a host; it does not depend on the host's answers."""
    return f"{host.workdir}/checkpoints/{job}/{folder_name(step)}"


def rows_of(host: HostRecord, job: str, rows: Sequence[CheckpointRow]) -> list[dict[str, Any]]:
    """Return rows of a job as they are printed; job and folder do not depend on the host's answers."""
    return [
        {
            "id": f"{job}@{row.step}", "job": job, "step": row.step, "time": row.time, "bytes": row.bytes,
            "complete": row.complete, "metrics": row.metrics, "folder": folder_on(host, job, row.step),
            "problem": row.problem,
        }
        for row in rows
    ]  # fmt: skip
