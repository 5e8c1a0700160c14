"""Trust in a checkpoint: the signature of its manifest, and which job file and code a restored job runs.

Manifests are stored on hosts, and a host may be compromised. A manifest's job file could ask for variables of the
operator's shell, and its code is the host's own. So a restored job runs the job file and code of this machine's record
of the job. Those of the manifest are used only when the operator has seen and accepted the difference, and they get no
variables of the shell.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.manifest import Manifest
from psctl.launch.home import JobRecord
from psctl.spec.job import JobSpec
from psctl.transport.protocol.authority import has_signed

Signer = Literal["job", "other", "none"]
"""The signer of a manifest: the job's authority as this machine recorded it, another key, or none."""

_CODE = re.compile(r"[0-9a-f]{40}")


class RestoreSource(msgspec.Struct, frozen=True):
    """The job file and the code's hash that a restored job runs; `own`: they are this machine's record of the job."""

    job_file: str
    code: str
    own: bool


def signer(record: JobRecord | None, data: bytes) -> Signer:
    """Return the signer of a manifest's file; without a record of the job's authority it is never "job"."""
    found = manifests.signature_of(data)
    if found is None:
        return "none"
    return "job" if record is not None and record.authority and has_signed(record.authority, *found) else "other"


def fault(record: JobRecord | None, data: bytes) -> str:
    """Return what is wrong with the signature of a manifest's file, or "".

    A job that was started before manifests were signed has no authority in its record: nothing is wrong then.
    """
    if record is None or not record.authority:
        return ""
    whose = f"the authority of {record.job}, as this machine recorded it when it started that job"
    return {
        "job": "",
        "other": f"{manifests.MANIFEST} is not signed by {whose}",
        "none": f"{manifests.MANIFEST} is not signed, expected: by {whose}",
    }[signer(record, data)]


def source_of(record: JobRecord, manifest: Manifest, agree: Callable[[list[str]], bool]) -> RestoreSource:
    """Return what a job that is restored from a checkpoint runs.

    Args:
        record: this machine's record of the checkpoint's job.
        manifest: of the checkpoint.
        agree: shown the lines in which the manifest differs from the record; returns whether the operator takes the
            manifest's. It raises where no question can be asked.

    Raises:
        UsageError: the operator does not; the manifest names no code.
    """
    own = RestoreSource(record.job_file, record.code_hash, own=True)
    lines = list(differences(record, manifest))
    if not lines:
        return own
    if not agree(lines):
        raise errors.UsageError(
            "nothing was done", hint="psctl checkpoint restore ... --job JOB.yaml uses a job file of this machine"
        )
    if not _CODE.fullmatch(manifest.code_hash):
        raise errors.UsageError(f"{manifest.id}: its manifest names no code: {manifest.code_hash!r}")
    return RestoreSource(manifest.job_file, manifest.code_hash, own=False)


def differences(record: JobRecord, manifest: Manifest) -> Iterator[str]:
    """Yield the lines in which a manifest's job file and code differ from this machine's record; none: they do not."""
    here, there = f"{record.job} as this machine started it", f"{manifest.id}, its manifest"
    mine, other = record.job_file.splitlines(), manifest.job_file.splitlines()
    yield from difflib.unified_diff(mine, other, here, there, lineterm="")
    if record.job_file != manifest.job_file and mine == other:
        yield "job file: the ends of its lines differ"
    if record.code_hash != manifest.code_hash:
        yield f"-code {record.code_hash}"
        yield f"+code {manifest.code_hash}"


def refuse_shell(job: JobSpec, given: dict[str, str | None], where: str) -> None:
    """Refuse variables of the operator's shell to a job file that does not lie on this machine.

    Raises:
        UsageError: it takes some; the message names them.
    """
    bare = [name for name, value in {**job.env, **given}.items() if value is None]
    asked = sorted({*job.secrets, *bare})
    if asked:
        raise errors.UsageError(
            f"the job file of {where} takes variables of your shell ({', '.join(asked)}): only a job file on this "
            f"machine gets those",
            hint="psctl checkpoint restore ... --job JOB.yaml",
            where=where,
        )
