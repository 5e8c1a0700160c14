"""Calls of the checkpoint tool on hosts, and the lists of checkpoints made from them.

A list has the checkpoints on each job's head, and the hosts that hold copies of them; where the head is not reached, it
has the copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from psctl import errors
from psctl.checkpoint.catalog import CheckpointRow, ListedCheckpoint
from psctl.checkpoint.reader import folder_name
from psctl.launch import leader_search
from psctl.launch.clusters import Connect, recalled_cluster
from psctl.launch.home import Home, HostRecord, JobRecord, by_cluster
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import UNDECODABLE, HostName

A = TypeVar("A")

_KINDS: dict[str, type[errors.PsctlError]] = {
    kind.code: kind
    for kind in (
        errors.NoSuchCheckpoint, errors.CheckpointIncomplete, errors.CheckpointCorrupt, errors.DiskFull,
        errors.UsageError, errors.VersionMismatch, errors.PythonMissing,
    )
}  # fmt: skip


class _ReportedError(msgspec.Struct):
    """An error as a host's tool reports it."""

    code: str
    message: str
    hint: str = ""
    where: str = ""


class _Refusal(msgspec.Struct):
    error: _ReportedError


class ListAnswer(msgspec.Struct):
    """Answer to `list`."""

    checkpoints: list[ListedCheckpoint]


class NewestAnswer(msgspec.Struct):
    """Answer to `newest`; None: the job has no sound one."""

    step: int | None
    skipped: list[str]


class ShowAnswer(msgspec.Struct):
    """Answer to `show`, as far as it is used: all else is read from the manifest."""

    step: int


class VerifyAnswer(ListedCheckpoint, frozen=True, kw_only=True):
    """Answer to `verify`."""

    verified: bool
    problems: list[str]


class PruneAnswer(msgspec.Struct):
    """Answer to `prune`."""

    removed: list[ListedCheckpoint]


def question(shell: Shell, host: HostRecord, verb: str, body: Mapping[str, object], kind: type[A]) -> A:
    """Call the checkpoint tool on a host; its errors are raised unchanged.

    Args:
        shell, host: the host.
        verb, body: the question.
        kind: what the answer must be.

    Raises:
        CommandFailed: the tool's output is no such answer.
    """
    result = shell.run(host.module("psctl.checkpoint.tool", verb, json.dumps(body)), check=False, timeout=None)
    try:
        if result.status == 0:
            return msgspec.json.decode(result.stdout, type=kind)
        refused = msgspec.json.decode(result.stdout, type=_Refusal).error
    except UNDECODABLE:
        tail = (result.stderr or result.stdout).decode(errors="replace")
        raise errors.CommandFailed(shell.name, f"psctl.checkpoint.tool {verb}", result.status, tail) from None
    raise _KINDS.get(refused.code, errors.PsctlError)(refused.message, refused.hint, refused.where)


def folder_on(host: HostRecord, job: str, step: int) -> str:
    """Return the folder of a checkpoint on a host; it does not depend on the host's answers."""
    return f"{host.workdir}/checkpoints/{job}/{folder_name(step)}"


def rows_of(host: HostRecord, job: str, listed: Sequence[ListedCheckpoint]) -> list[CheckpointRow]:
    """Return rows of a job as they are printed; job, folder and host do not depend on the host's answers."""
    rows = [
        ListedCheckpoint(job, row.step, row.time, row.bytes, row.metrics, folder_on(host, job, row.step), row.problem)
        for row in listed
    ]
    return [{**row.document(), "host": host.name, "hosts": [host.name]} for row in rows]


class ListedCheckpoints(msgspec.Struct, frozen=True):
    """The checkpoints of some jobs.

    `rows` are those of `checkpoint list`, each with the hosts that hold it. `notes` name the jobs whose copies were
    listed instead. `missing` has the jobs of which no host was reached, each with the error of its head.
    """

    rows: list[CheckpointRow]
    notes: list[str]
    missing: dict[str, errors.PsctlError]


def list_all(home: Home, records: Sequence[JobRecord], connect: Connect) -> ListedCheckpoints:
    """List the checkpoints of these jobs, in their order."""
    found: dict[str, list[CheckpointRow]] = {}
    failed: dict[str, errors.PsctlError] = {}
    for _, group in by_cluster(records):
        moved = _list_on_heads(home, group, connect, found, failed)
        led = {record.job: leader_search.find(home, record, connect) for record in moved}
        led_elsewhere = [led[record.job] for record in moved if led[record.job].leader != record.leader]
        if led_elsewhere:
            _list_on_heads(home, led_elsewhere, connect, found, failed)
            records = [led.get(record.job, record) for record in records]
    notes: list[str] = []
    for record, copies in _copies(home, records, connect):
        if record.job in failed and copies:
            head, message = record.head.name, failed.pop(record.job).message
            why = f"its head {head} is not reached ({message.removeprefix(f'{head}: ')})"
            notes.append(f"{record.job}: {why}; these are the copies on {', '.join(copies)}")
            found[record.job] = []
        if record.job in found:
            found[record.job] = _with_copies(found[record.job], copies)
    return ListedCheckpoints([row for record in records for row in found.get(record.job, [])], notes, failed)


def _list_on_heads(
    home: Home, group: Sequence[JobRecord], connect: Connect, found: dict[str, list[CheckpointRow]],
    failed: dict[str, errors.PsctlError],
) -> list[JobRecord]:  # fmt: skip
    """List the checkpoints on the heads of jobs of one cluster; return the jobs that another host may lead."""
    heads = sorted({record.head.name for record in group})
    with connect(recalled_cluster(home, group[0].cluster), heads) as fleet:
        for record in group:
            failed.pop(record.job, None)
            try:
                found[record.job] = rows_on(fleet.shell(record.head.name), record.head, record)
            except errors.PsctlError as error:
                failed[record.job] = error
        return [record for record in group if leader_search.has_moved(fleet, record)]


def _copies(
    home: Home, records: Sequence[JobRecord], connect: Connect
) -> Iterator[tuple[JobRecord, dict[HostName, list[CheckpointRow]]]]:
    """Yield each job with what its hosts beside the head hold; a host that did not answer is left out."""
    for _, group in by_cluster(records):
        names = sorted({host.name for record in group for host in record.hosts if host is not record.head})
        if not names:
            yield from ((record, {}) for record in group)
            continue
        with connect(recalled_cluster(home, group[0].cluster), names) as fleet:
            for record in group:
                yield record, _copies_of(fleet, record)


def _copies_of(fleet: Fleet, record: JobRecord) -> dict[HostName, list[CheckpointRow]]:
    others = {HostName(host.name): host for host in record.hosts if host is not record.head}

    def ask(name: HostName, shell: Shell) -> list[CheckpointRow]:
        return rows_on(shell, others[name], record)

    asked = fleet.each(ask, [name for name in others if name in fleet.shells])
    return {name: outcome.value for name, outcome in asked.items() if outcome.ok}


def _with_copies(
    rows: Sequence[CheckpointRow], copies: Mapping[HostName, Sequence[CheckpointRow]]
) -> list[CheckpointRow]:
    """Return the head's rows with the hosts that hold a whole copy; without any, the rows of the copies, by step."""
    listed = rows or [row for each in copies.values() for row in each]
    by_step: dict[int, CheckpointRow] = {}
    for row in sorted(listed, key=lambda row: (row["step"], not row["complete"])):
        by_step.setdefault(row["step"], row)
    for step, row in by_step.items():
        row["hosts"] = list(dict.fromkeys([*([row["host"]] if row["complete"] else []), *_holders(copies, step)]))
    return list(by_step.values())


def _holders(copies: Mapping[HostName, Sequence[CheckpointRow]], step: int) -> list[str]:
    """Return the hosts with a complete copy of a step's checkpoint."""
    return [name for name, held in copies.items() if any(row["step"] == step and row["complete"] for row in held)]


def holders(home: Home, record: JobRecord, first: str, step: int, connect: Connect) -> list[str]:
    """Return the hosts of a job that hold a checkpoint: the one where it was found first, then the others."""
    found = [first]
    for _, copies in _copies(home, [record], connect):
        found += _holders(copies, step)
    return list(dict.fromkeys(found))


def rows_on(shell: Shell, host: HostRecord, record: JobRecord) -> list[CheckpointRow]:
    """Return the checkpoints of a job that one of its hosts holds."""
    body = {"root": f"{host.workdir}/checkpoints", "job": record.job}
    return rows_of(host, record.job, question(shell, host, "list", body, ListAnswer).checkpoints)
