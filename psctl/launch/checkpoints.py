"""Checkpoints of jobs, wherever they lie: asked about, verified, brought here, carried to another host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from psctl import errors
from psctl.checkpoint import files
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.writer import publish
from psctl.launch.archive import Archive
from psctl.launch.clusters import recall
from psctl.launch.connecting import Connect
from psctl.launch.converge import Converging
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.remote.shell import Shell
from psctl.spec.job import load_job
from psctl.words import HostName

_REFERENCE = re.compile(r"(?P<job>[^@]+)@(?P<which>[0-9]+|latest|best)")

_KINDS: dict[str, type[errors.PsctlError]] = {
    kind.code: kind
    for kind in (
        errors.NoSuchCheckpoint, errors.CheckpointIncomplete, errors.CheckpointCorrupt, errors.DiskFull,
        errors.UsageError, errors.VersionMismatch, errors.PythonMissing,
    )
}  # fmt: skip


class Located(msgspec.Struct, frozen=True):
    """A checkpoint and where it was found. `brief` is its manifest without slices, plus `folder` and `files`."""

    record: JobRecord
    host: HostRecord
    brief: dict[str, Any]

    @property
    def id(self) -> str:
        """How users name it."""
        return str(self.brief["id"])

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return int(self.brief["step"])


def split(reference: str) -> tuple[str, str]:
    """Split "digits-3@500" into job and step, "latest" or "best".

    Raises:
        UsageError: it reads otherwise.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise errors.UsageError(
            f'"{reference}" names no checkpoint', hint="write JOB@STEP, JOB@latest or JOB@best", where=reference
        )
    return match["job"], match["which"]


def question(shell: Shell, host: HostRecord, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the tool of the checkpoint room on a host; its errors are raised as they are."""
    program = ["env", f"PYTHONPATH={host.code}", host.python, "-m", "psctl.checkpoint.tool", verb, json.dumps(body)]
    result = shell.run(program, check=False, timeout=None)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        tail = (result.stderr or result.stdout).decode(errors="replace")
        raise errors.CommandFailed(shell.name, f"psctl.checkpoint.tool {verb}", result.status, tail) from None
    if result.status == 0:
        return dict(answer)
    said = answer["error"]
    raise _KINDS.get(said["code"], errors.PsctlError)(said["message"], said["hint"], said["where"])


def keep_best(record: JobRecord) -> tuple[str, str] | None:
    """Return (metric, mode) of the job's `checkpoint.keep_best`."""
    best = load_job(record.job_file, record.job_source).checkpoint.keep_best
    return (best.metric, best.mode) if best else None


def list_all(home: Home, records: Sequence[JobRecord], connect: Connect) -> list[dict[str, Any]]:
    """Return the rows of `checkpoint list` for these jobs: each job's head is asked."""
    rows: list[dict[str, Any]] = []
    for cluster, group in _by_cluster(records):
        with connect(recall(home, cluster.cluster), sorted({record.head.name for record in group})) as fleet:
            for record in group:
                name = HostName(record.head.name)
                if name in fleet.failed:
                    raise fleet.failed[name]
                body = {"root": record.checkpoints, "job": record.job}
                rows += question(fleet.shells[name], record.head, "list", body)["checkpoints"]
    return rows


def find(home: Home, record: JobRecord, which: str, connect: Connect) -> Located:
    """Find a checkpoint and prove it: on the job's head, else as the copy that another of its hosts keeps.

    Raises:
        the head's error (not reached, no such checkpoint, or a damaged one), when no other host has it whole.
    """
    first: errors.PsctlError | None = None
    head, *others = record.hosts
    for hosts in ([head], others):
        if not hosts:
            continue
        with connect(recall(home, record.cluster), [host.name for host in hosts]) as fleet:
            for host in hosts:
                try:
                    if HostName(host.name) in fleet.failed:
                        raise fleet.failed[HostName(host.name)]
                    shell = fleet.shells[HostName(host.name)]
                    found = locate(shell, record, which, host)
                    verify(shell, found)
                except errors.PsctlError as error:
                    first = first or error
                else:
                    return found
    assert first is not None, "a job has a head"
    raise first


def locate(shell: Shell, record: JobRecord, which: str, host: HostRecord | None = None) -> Located:
    """Find a checkpoint on a host of its job; the head's when none is named.

    Raises:
        NoSuchCheckpoint: the job has none of that step; the message says which there are.
        CheckpointIncomplete, CheckpointCorrupt: it is torn or damaged.
    """
    host = host or record.head
    body = {"root": f"{host.workdir}/checkpoints", "job": record.job, "which": which, "keep_best": keep_best(record)}
    return Located(record, host, question(shell, host, "show", body))


def newest(shell: Shell, record: JobRecord, warn: Callable[[str], None]) -> Located | None:
    """Return a job's newest checkpoint whose every byte is right; None when it has none. Damaged ones are told of."""
    answer = question(shell, record.head, "newest", {"root": record.checkpoints, "job": record.job})
    for sentence in answer["skipped"]:
        warn(sentence)
    return None if answer["step"] is None else locate(shell, record, str(answer["step"]))


def verify(shell: Shell, found: Located) -> None:
    """Read every byte of a checkpoint where it lies.

    Raises:
        CheckpointCorrupt: bytes were changed; the message names the file.
    """
    answer = question(shell, found.host, "verify", {"folder": found.brief["folder"]})
    if answer["problems"]:
        raise errors.CheckpointCorrupt(
            f"{found.id} on {found.host.name}: {answer['problems'][0]}",
            hint=f"psctl checkpoint list {found.record.job} shows the others",
            where=found.id,
        )


def examine(shell: Shell, record: JobRecord, which: str) -> dict[str, Any]:
    """Return the row of `checkpoint verify`; what is wrong stands in its `problems`."""
    body = {"root": record.checkpoints, "job": record.job, "which": which, "keep_best": keep_best(record)}
    return question(shell, record.head, "verify", body)


def export(shell: Shell, found: Located, out: Path) -> int:
    """Write a checkpoint's model to a file of this machine; return its bytes.

    It is assembled beside the checkpoint, for that is smaller than all of it, and brought here.
    """
    there = f"{found.brief['folder']}.{os.getpid()}.export"
    try:
        size = int(question(shell, found.host, "export", {"folder": found.brief["folder"], "out": there})["bytes"])
        shell.fetch(there, out)
    finally:
        shell.run(["rm", "-f", there], check=False)
    return size


def prune(shell: Shell, record: JobRecord, keep: int) -> list[dict[str, Any]]:
    """Remove a job's older checkpoints on its head; return the rows of those removed."""
    body = {"root": record.checkpoints, "job": record.job, "keep": keep, "keep_best": keep_best(record)}
    return list(question(shell, record.head, "prune", body)["removed"])


def pull(shell: Shell, found: Located, folder: Path) -> Path:
    """Bring a checkpoint to a folder of this machine, proved; return where it lies.

    Args:
        folder: gets a folder JOB@STEP in it; made when it is missing.

    Raises:
        UsageError: something of that name is there already.
    """
    target = folder / f"{found.record.job}@{found.step}"
    if target.exists():
        raise errors.UsageError(f"{target} is there already", hint="name another folder, or remove it")
    partial = target.with_name(f"{target.name}.partial")
    _fetch(shell, found, partial)
    problems = files.verify(partial)
    if problems:
        raise errors.CheckpointCorrupt(f"{found.id} came damaged: {problems[0]}", hint="try again", where=found.id)
    publish(partial, target, Disk())
    return target


def bring(source: Shell, found: Located, target: Shell, host: HostRecord, root: str) -> str:
    """See that a verified copy of a checkpoint lies on another host; return its folder there.

    A copy that lies there already (a job keeps a second one) is proved and used; else it is carried over this machine.

    Args:
        source: a connection to where it lies.
        target, host: the new head, where psctl's code already is.
        root: the folder of checkpoints there.
    """
    folder = f"{root}/{found.record.job}/{found.step:010d}"
    with contextlib.suppress(errors.CheckpointIncomplete, errors.CheckpointCorrupt, errors.NoSuchCheckpoint):
        answer = question(target, host, "verify", {"folder": folder})
        if answer["verified"]:
            return folder
    with tempfile.TemporaryDirectory(prefix="psctl-carry-") as here:
        _fetch(source, found, Path(here))
        partial = f"{folder}.carried.{os.getpid()}.partial"
        for name in found.brief["files"]:
            target.put(Path(here) / name, f"{partial}/{name}")
    question(target, host, "adopt", {"partial": partial, "folder": folder})
    return folder


def bring_code(source: Shell, found: Located, state: Converging) -> Archive | None:
    """Return the archive of the code that a checkpoint was made with, unless every host has it.

    Raises:
        NoSuchCheckpoint: the host that ran the job no longer has it; --job names another.
    """
    code = str(found.brief["code_hash"])
    if all(site.codes.get(code) for site in state.sites.values()):
        return None
    path = f"{found.host.workdir}/code/{code}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="psctl-carry-") as here:
        packed = Path(here) / "code.tar.gz"
        try:
            source.fetch(path, packed)
        except errors.CommandFailed as error:
            raise errors.NoSuchCheckpoint(
                f"{found.id}: its code is no longer on {found.host.name}",
                hint="psctl checkpoint restore ... --job JOB.yaml uses another job file and its folder",
                where=found.id,
            ) from error
        return Archive(code, packed.read_bytes(), [], 0)


def _fetch(shell: Shell, found: Located, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in found.brief["files"]:
        shell.fetch(f"{found.brief['folder']}/{name}", folder / name)


def _by_cluster(records: Sequence[JobRecord]) -> list[tuple[JobRecord, list[JobRecord]]]:
    groups: dict[tuple[str, str], list[JobRecord]] = {}
    for record in records:
        groups.setdefault((record.cluster.name, record.cluster.text), []).append(record)
    return [(group[0], group) for group in groups.values()]
