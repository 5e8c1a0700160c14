"""Finds, verifies, exports, prunes and copies checkpoints of jobs on their hosts.

A host may be compromised, and then its answers are false. So a checkpoint's folder follows from this machine's record
of the job and from a step, and never from a path or a name that a host sent. The manifest is fetched and verified here;
the names, sizes and checksums of all other files are those of the manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.catalog import CheckpointRow, best_step, steps_to_remove
from psctl.checkpoint.copies import CheckpointReceiver
from psctl.checkpoint.disk import writing
from psctl.checkpoint.export import ExportReceiver
from psctl.checkpoint.manifest import MANIFEST, Manifest, whole_tensors
from psctl.checkpoint.writer import EXPORT_SUFFIX, remove_abandoned_for
from psctl.launch import leader_search
from psctl.launch.archive import Archive, prove
from psctl.launch.checkpoints import manifest_trust
from psctl.launch.checkpoints.checkpoint_listing import (
    ListAnswer,
    NewestAnswer,
    PruneAnswer,
    ShowAnswer,
    VerifyAnswer,
    folder_on,
    question,
    rows_of,
)
from psctl.launch.clusters import Connect, recalled_cluster
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.launch.hosts.site import HostSite
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.spec.noted_options import load_noted
from psctl.types import HostName, JsonObject

MOST_STEPS = 10**15
"""A step beyond this is none."""

PACKED_LIMIT = 1 << 32
"""Bytes that a job's packed folder has at most; `archive.LIMIT` bounds its files."""

OTHER_JOB_FILE = "psctl checkpoint restore ... --job JOB.yaml uses another job file and its folder"

_OTHERS = "psctl checkpoint list {} shows the others"

_REFERENCE = re.compile(r"(?P<job>[^@]+)@(?P<which>[0-9]+|latest|best)")


class LocatedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint and its host; `data` is the content of its manifest's file, `manifest` the decoded one."""

    record: JobRecord
    host: HostRecord
    manifest: Manifest
    data: bytes

    @property
    def id(self) -> str:
        """How users name it."""
        return self.manifest.id

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step

    @property
    def folder(self) -> str:
        """Where it lies on its host."""
        return folder_on(self.host, self.record.job, self.step)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each of its files."""
        return self.manifest.sizes() | {MANIFEST: len(self.data)}

    @property
    def brief(self) -> JsonObject:
        """What `checkpoint show` prints."""
        return brief_of(self.manifest, self.data, self.folder, self.record)


def brief_of(manifest: Manifest, data: bytes, folder: str, record: JobRecord | None) -> JsonObject:
    """Return what `checkpoint show` prints of a checkpoint.

    Args:
        manifest, data: its manifest, and the content of that's file.
        folder: where it lies.
        record: of its job, where this machine has one.
    """
    found = {key: value for key, value in msgspec.to_builtins(manifest).items() if key not in ("files", "state")}
    return found | {
        "id": manifest.id, "folder": folder, "bytes": manifest.bytes, "complete": True,
        "written": manifest.written, "earlier_steps": manifest.earlier_steps,
        "tensors": [
            {"name": each.name, "dtype": each.dtype, "shape": list(each.shape)} for each in whole_tensors(manifest)
        ],
        "files": manifest.sizes() | {MANIFEST: len(data)}, "signed": manifest_trust.signer(record, data),
    }  # fmt: skip


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


def keep_best(record: JobRecord) -> tuple[str, str] | None:
    """Return (metric, mode) of the job's `checkpoint.keep_best`."""
    return keep_best_in(record.job_file, record.job_source)


def keep_best_in(job_file: str, source: str) -> tuple[str, str] | None:
    """Return (metric, mode) of a job file's `checkpoint.keep_best`, with the options that its text records."""
    best = load_noted(job_file, source).checkpoint.keep_best
    return (best.metric, best.mode) if best else None


def find(home: Home, record: JobRecord, which: str, connect: Connect) -> LocatedCheckpoint:
    """Find a checkpoint and prove it: on the job's head, else as the copy that another of its hosts keeps.

    Raises:
        the head's error (not reached, no such checkpoint, or a damaged one), when no other host has it whole.
    """
    with reached(home, record, which, connect, proves=True) as (_, found):
        return found


@contextlib.contextmanager
def reached(
    home: Home, record: JobRecord, which: str, connect: Connect, *, proves: bool = False
) -> Iterator[tuple[Shell, LocatedCheckpoint]]:
    """Give a checkpoint and a shell on its host: the job's head, else another host that keeps a copy.

    Args:
        proves: read its every byte, and pass over a damaged one.

    Raises:
        the head's error, as `find`.
    """
    cluster = recalled_cluster(home, record.cluster)
    first: errors.PsctlError | None = None
    for others in (False, True):
        hosts = [host for host in record.hosts if (host is not record.head) == others]
        if not hosts:
            continue
        with connect(cluster, [host.name for host in hosts]) as fleet:
            if not others and leader_search.has_moved(fleet, record):
                record = leader_search.find(home, record, connect)
                if record.head is not hosts[0]:
                    continue
            found, problem = _located(fleet, record, which, hosts, proves)
            if found is not None:
                yield fleet.shell(found.host.name), found
                return
            first = first or problem
    assert first is not None, "a job has a head"
    raise first


def _located(
    fleet: Fleet, record: JobRecord, which: str, hosts: Sequence[HostRecord], proves: bool
) -> tuple[LocatedCheckpoint | None, errors.PsctlError | None]:
    """Return the newest (of `best` the best) checkpoint that one of these hosts holds, else the first error."""
    first: errors.PsctlError | None = None
    candidates: list[LocatedCheckpoint] = []
    for host in hosts:
        try:
            candidates.append(locate(fleet.shell(host.name), record, which, host))
        except errors.PsctlError as error:
            first = first or error
    best = keep_best(record) or ("loss", "min")
    while candidates:
        metrics = [(each.step, each.manifest.metrics) for each in candidates]
        wanted = best_step(metrics, *best) if which == "best" else None
        step = max(each.step for each in candidates) if wanted is None else wanted
        found = next(each for each in candidates if each.step == step)
        candidates.remove(found)
        try:
            if proves:
                verify(fleet.shell(found.host.name), found)
        except errors.PsctlError as error:
            first = first or error
        else:
            return found, None
    return None, first


def locate(shell: Shell, record: JobRecord, which: str, host: HostRecord | None = None) -> LocatedCheckpoint:
    """Find a checkpoint on a host of its job; the head's when none is named.

    Raises:
        NoSuchCheckpoint: the job has none of that step; the message lists the existing ones.
        CheckpointIncomplete, CheckpointCorrupt: it is torn or damaged, or not the requested one.
    """
    host = host or record.head
    body = {"root": f"{host.workdir}/checkpoints", "job": record.job, "which": which, "keep_best": keep_best(record)}
    step = question(shell, host, "show", body, ShowAnswer).step
    where = f"{record.job}@{which} on {host.name}"
    if not 0 <= step <= MOST_STEPS or (which.isdecimal() and step != int(which)):
        raise errors.CheckpointCorrupt(f"{where}: the host answers with step {step}", where=where)
    data = _manifest_file(shell, host, record.job, step)
    manifest = manifests.decode(data, where)
    wrong = manifest_trust.fault(record, data)
    if wrong:
        raise errors.CheckpointCorrupt(f"{where}: {wrong}", hint=_OTHERS.format(record.job), where=where)
    if (manifest.job, manifest.step) != (record.job, step):
        raise errors.CheckpointCorrupt(f"{where}: its manifest is that of {manifest.id}", where=where)
    return LocatedCheckpoint(record, host, manifest, data)


def _manifest_file(shell: Shell, host: HostRecord, job: str, step: int) -> bytes:
    parts: list[bytes] = []
    shell.fetch(f"{folder_on(host, job, step)}/{MANIFEST}", parts.append, manifests.MAX_MANIFEST)
    return b"".join(parts)


def newest(shell: Shell, record: JobRecord, warn: Callable[[str], None]) -> LocatedCheckpoint | None:
    """Return a job's newest checkpoint without faults; None when there is none. Damaged ones are passed to `warn`."""
    answer = question(shell, record.head, "newest", {"root": record.checkpoints, "job": record.job}, NewestAnswer)
    for sentence in answer.skipped:
        warn(sentence)
    return None if answer.step is None else locate(shell, record, str(answer.step))


def verify(shell: Shell, found: LocatedCheckpoint) -> None:
    """Read every byte of a checkpoint where it lies.

    Raises:
        CheckpointCorrupt: bytes were changed; the message names the file.
    """
    answer = question(shell, found.host, "verify", {"folder": found.folder}, VerifyAnswer)
    if answer.problems:
        raise errors.CheckpointCorrupt(
            f"{found.id} on {found.host.name}: {answer.problems[0]}",
            hint=_OTHERS.format(found.record.job),
            where=found.id,
        )


def examine(shell: Shell, record: JobRecord, which: str) -> CheckpointRow:
    """Return the row of `checkpoint verify` with its `problems`."""
    body = {"root": record.checkpoints, "job": record.job, "which": which, "keep_best": keep_best(record)}
    row = question(shell, record.head, "verify", body, VerifyAnswer)
    data = b"" if row.problem else _manifest_file(shell, record.head, record.job, row.step)
    wrong = "" if row.problem else manifest_trust.fault(record, data)
    problems = [*row.problems, *([wrong] if wrong else [])]
    document = rows_of(record.head, record.job, [row])[0]
    signer = manifest_trust.signer(record, data)
    return {**document, "verified": not problems, "problems": problems, "signed": signer}


def export(shell: Shell, found: LocatedCheckpoint, out: Path) -> int:
    """Write a checkpoint's model to a file of this machine, proved; return its bytes.

    It is assembled beside the checkpoint, for that is smaller than all of it, and brought here. Every byte of it is
    compared with the model in the manifest.
    """
    there = f"{found.folder}.{os.getpid()}{EXPORT_SUFFIX}"
    try:
        question(shell, found.host, "export", {"folder": found.folder, "out": there}, dict)
        with ExportReceiver(found.manifest, out) as exported:
            shell.fetch(there, exported.write, exported.size)
            exported.finish()
    finally:
        shell.run(["rm", "-f", there], check=False)
    return exported.size


def export_rows(shell: Shell, found: LocatedCheckpoint, store: str, out: Path) -> tuple[int, int]:
    """Write the rows of integer keys of a store to a file of this machine; return the rows, and the file's bytes.

    The checkpoint is brought here whole, proved, and removed again.
    """
    from psctl.kv.table_export import export_table  # loads torch

    with writing(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", suffix=EXPORT_SUFFIX, dir=out.absolute().parent) as here:
        return export_table(pull(shell, found, Path(here)), found.manifest, store, out)


def export_dcp(shell: Shell, found: LocatedCheckpoint, out: Path) -> int:
    """Write a checkpoint as a new folder of torch.distributed.checkpoint on this machine; return its bytes.

    The checkpoint is brought here whole, proved, and removed again.
    """
    from psctl.train_state import dcp_export  # loads torch

    with writing(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", suffix=EXPORT_SUFFIX, dir=out.absolute().parent) as here:
        return dcp_export.export_dcp(pull(shell, found, Path(here)), found.manifest, out)


def to_prune(shell: Shell, record: JobRecord, keep: int) -> list[str]:
    """Return the names of what `prune` would remove, oldest first; nothing is changed."""
    rows = question(shell, record.head, "list", {"root": record.checkpoints, "job": record.job}, ListAnswer).checkpoints
    whole = [(row.step, row.metrics) for row in rows if not row.problem]
    return [f"{record.job}@{step}" for step in steps_to_remove(whole, keep, keep_best(record))]


def prune(shell: Shell, record: JobRecord, keep: int) -> list[CheckpointRow]:
    """Remove a job's older checkpoints on its head; return the rows of those removed."""
    body = {"root": record.checkpoints, "job": record.job, "keep": keep, "keep_best": keep_best(record)}
    return rows_of(record.head, record.job, question(shell, record.head, "prune", body, PruneAnswer).removed)


def prune_copies(fleet: Fleet, record: JobRecord, keep: int) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Remove the copies of a job's older checkpoints on its hosts beside the head, by the rule of `prune`.

    Returns:
        The steps that were removed by host, and the reasons of hosts where none could be.
    """
    others = {HostName(host.name): host for host in record.hosts if host is not record.head}

    def act(name: HostName, shell: Shell) -> list[int]:
        root = f"{others[name].workdir}/checkpoints"
        body = {"root": root, "job": record.job, "keep": keep, "keep_best": keep_best(record)}
        return [row.step for row in question(shell, others[name], "prune", body, PruneAnswer).removed]

    done = fleet.each(act, others)
    removed = {str(name): outcome.value for name, outcome in done.items() if outcome.ok and outcome.value}
    return removed, {str(name): outcome.error.message for name, outcome in done.items() if outcome.error is not None}


def pull(shell: Shell, found: LocatedCheckpoint, folder: Path) -> Path:
    """Bring a checkpoint to a folder of this machine, proved; return where it lies.

    Args:
        folder: gets a folder JOB@STEP in it; made when it is missing.

    Raises:
        UsageError: a file or folder of that name exists already.
    """
    target = folder / f"{found.record.job}@{found.step}"
    if os.path.lexists(target):
        raise errors.UsageError(f"{target} exists already", hint="name another folder, or remove it")
    _receive(shell, found, target)
    return target


def bring(source: Shell, found: LocatedCheckpoint, target: Shell, host: HostRecord) -> str:
    """See that a verified copy of a checkpoint lies on another host; return its folder there.

    A copy that lies there already (a job keeps a second one) is proved and used; else it is carried over this machine.

    Args:
        source: a connection to where it lies.
        target, host: the new head, where psctl's code already is.
    """
    folder = folder_with_copy(found.manifest, target, host)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="psctl-carry-") as here:
            proved = Path(here) / "checkpoint"
            _receive(source, found, proved)
            folder = send_copy(found.manifest, proved, found.sizes, target, host)
    return folder


def folder_with_copy(manifest: Manifest, shell: Shell, host: HostRecord) -> str | None:
    """Return the folder of a checkpoint on a host, if a verified copy lies there."""
    folder = folder_on(host, manifest.job, manifest.step)
    with contextlib.suppress(errors.CheckpointIncomplete, errors.CheckpointCorrupt, errors.NoSuchCheckpoint):
        if question(shell, host, "verify", {"folder": folder}, VerifyAnswer).verified:
            return folder
    return None


def send_copy(manifest: Manifest, proved: Path, sizes: Mapping[str, int], shell: Shell, host: HostRecord) -> str:
    """Send a checkpoint, of which this machine has a proved copy, to a host; return its folder there."""
    folder = folder_on(host, manifest.job, manifest.step)
    partial = f"{folder}.carried.{os.getpid()}.partial"
    for name in sizes:
        shell.put(proved / name, f"{partial}/{name}")
    question(shell, host, "adopt", {"partial": partial, "folder": folder}, dict)
    return folder


def bring_code(
    source: Shell, host: HostRecord, checkpoint: str, sites: Mapping[str, HostSite], code: str
) -> Archive | None:
    """Return the archive of the code that a job is to run again with, unless every host has it.

    Args:
        source, host: a host of the job that ran that code.
        checkpoint: the name of the checkpoint that is restored, for messages.
        sites: the hosts that are to have it.
        code: its hash, by which it is proved.

    Raises:
        NoSuchCheckpoint: the host that ran the job no longer has it, or something else; --job names another.
    """
    if all(site.codes.get(code) for site in sites.values()):
        return None
    try:
        return fetch_code(source, host.workdir, code)
    except (errors.CommandFailed, errors.InvalidFile) as error:
        raise errors.NoSuchCheckpoint(
            f"{checkpoint}: its code is no longer on {host.name} as it was sent: {error.message}",
            hint=OTHER_JOB_FILE,
            where=checkpoint,
        ) from error


def fetch_code(source: Shell, workdir: str, code: str) -> Archive:
    """Return the archive of a job's folder from a host that ran it.

    Args:
        source: the host.
        workdir: psctl's folder there.
        code: its hash, by which it is proved.

    Raises:
        CommandFailed: the host does not have it any more.
        InvalidFile: it has something else.
    """
    parts: list[bytes] = []
    source.fetch(f"{workdir}/code/{code}.tar.gz", parts.append, PACKED_LIMIT)
    data = b"".join(parts)
    prove(data, code)
    return Archive(code, [], 0, data=data)


def _receive(shell: Shell, found: LocatedCheckpoint, folder: Path) -> None:
    """Bring all of a checkpoint into a new folder of this machine, proved; nothing is left of one that is not whole."""
    remove_abandoned_for(folder)
    receiver = CheckpointReceiver(folder, found.sizes)
    try:
        receiver.write_part(MANIFEST, 0, found.data)
        for name, size in found.manifest.sizes().items():
            shell.fetch(f"{found.folder}/{name}", receiver.writer_of(name), size)
        receiver.finish()
    except BaseException:
        receiver.discard()
        raise
