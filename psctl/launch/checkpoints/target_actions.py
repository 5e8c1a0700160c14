"""Acts on checkpoints at a `checkpoint.to`, which this machine reaches itself: no host is asked.

A checkpoint there is named URL/JOB@STEP, with the URL of the job file's `checkpoint.to`. What lies there may have been
changed by others, so manifests are compared with this machine's record of the job where there is one. Where there is
none, who wrote a checkpoint cannot be proved: it is read as data only, and no job file or code of it is run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from psctl import errors
from psctl.checkpoint.catalog import CheckpointRow, ListedCheckpoint, best_step, steps_to_remove
from psctl.checkpoint.disk import writing
from psctl.checkpoint.export import export_model
from psctl.checkpoint.manifest import MANIFEST, Manifest
from psctl.checkpoint.reader import folder_name
from psctl.checkpoint.upload import CheckpointTarget
from psctl.checkpoint.writer import EXPORT_SUFFIX
from psctl.launch.checkpoints import checkpoint_actions, manifest_trust
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.remote.shell import Shell
from psctl.types import JsonObject


class TargetCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint at a `checkpoint.to`.

    `record` is this machine's record of its job, where it has one; `data` is the content of its manifest's file, whose
    signature is compared with the record's, and `manifest` the decoded one.
    """

    target: CheckpointTarget
    record: JobRecord | None
    manifest: Manifest
    data: bytes

    @property
    def id(self) -> str:
        """How messages name it."""
        return self.manifest.id

    @property
    def reference(self) -> str:
        """How command lines name it."""
        return f"{self.target.target}/{self.manifest.id}"

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step

    @property
    def brief(self) -> JsonObject:
        """What `checkpoint show` prints."""
        place = self.target.place(self.manifest.job, self.step)
        return checkpoint_actions.brief_of(self.manifest, self.data, place, self.record)

    @contextlib.contextmanager
    def fetched(self, beside: Path | None = None) -> Iterator[Path]:
        """Yield the folder of a verified copy on this machine, next to a path if one is given; it is removed then."""
        if beside is not None:
            with writing(beside):
                beside.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="psctl-fetch-", suffix=EXPORT_SUFFIX, dir=beside.absolute().parent if beside else None
        ) as here:
            folder = Path(here) / folder_name(self.step)
            self.target.fetch(self.manifest.job, self.step, folder)
            yield folder


def is_target(reference: str) -> bool:
    """Return whether a name of a checkpoint or a job is one at a URL."""
    return "://" in reference


def list_at(url: str) -> list[CheckpointRow]:
    """Return the rows of all checkpoints below a URL: that of `checkpoint.to`, or of one job's folder in it."""
    target, job = CheckpointTarget(url), ""
    if not target.jobs():
        upper, _, job = url.rstrip("/").rpartition("/")
        target = CheckpointTarget(upper)
    rows = []
    for each in [job] if job else target.jobs():
        for step in target.steps(each):
            manifest, _ = target.manifest(each, step)
            place = target.place(each, step)
            listed = ListedCheckpoint(each, step, manifest.time, manifest.bytes, manifest.metrics, place)
            rows.append(listed.document())
    return rows


def find(home: Home, reference: str) -> TargetCheckpoint:
    """Return a checkpoint of a URL, its manifest proved; its other bytes are proved when they are fetched.

    Raises:
        NoSuchCheckpoint: there is none of that name; the message lists the existing ones.
        CheckpointCorrupt: it is not signed as this machine's record of its job says, or is another one.
    """
    found = _find(home, reference)
    wrong = manifest_trust.fault(found.record, found.data)
    if wrong:
        raise errors.CheckpointCorrupt(f"{reference}: {wrong}", where=reference)
    return found


def verify_at(home: Home, reference: str) -> CheckpointRow:
    """Fetch every byte of a checkpoint and compare it with its manifest; return the row of `checkpoint verify`."""
    found = _find(home, reference)
    manifest, place = found.manifest, found.target.place(found.manifest.job, found.step)
    problems = [fault] if (fault := manifest_trust.fault(found.record, found.data)) else []
    try:
        with found.fetched():
            pass
    except errors.CheckpointCorrupt as error:
        problems.append(error.message)
    listed = ListedCheckpoint(manifest.job, found.step, manifest.time, manifest.bytes, manifest.metrics, place)
    return {**listed.verified_row(problems), "signed": manifest_trust.signer(found.record, found.data)}


def pull_from(home: Home, reference: str, folder: Path) -> tuple[Path, int]:
    """Bring a checkpoint to a new folder JOB@STEP of this machine, proved; return where it lies, and its bytes.

    Raises:
        UsageError: a file or folder of that name exists already.
        CheckpointCorrupt: it is damaged, or not signed as this machine's record of its job says.
    """
    found = find(home, reference)
    here = folder / found.id
    if os.path.lexists(here):
        raise errors.UsageError(f"{here} exists already", hint="name another folder, or remove it")
    return here, found.target.fetch(found.manifest.job, found.step, here).bytes


def export(found: TargetCheckpoint, out: Path) -> int:
    """Write a checkpoint's model to a file of this machine; return its bytes."""
    with found.fetched(out) as folder:
        return export_model(folder, found.manifest, out)


def export_rows(found: TargetCheckpoint, store: str, out: Path) -> tuple[int, int]:
    """Write the rows of integer keys of a store to a file of this machine; return the rows, and the file's bytes."""
    from psctl.kv.table_export import export_table  # loads torch

    with found.fetched(out) as folder:
        return export_table(folder, found.manifest, store, out)


def export_dcp(found: TargetCheckpoint, out: Path) -> int:
    """Write a checkpoint as a new folder of torch.distributed.checkpoint on this machine; return its bytes."""
    from psctl.train_state import dcp_export  # loads torch

    with found.fetched(out) as folder:
        return dcp_export.export_dcp(folder, found.manifest, out)


def bring(found: TargetCheckpoint, shell: Shell, host: HostRecord) -> str:
    """See that a verified copy of a checkpoint lies on a host; return its folder there.

    A copy that is there already is used. Else this machine fetches it and sends it on, so the host needs neither the
    package of the URL's protocol nor credentials.
    """
    folder = checkpoint_actions.folder_with_copy(found.manifest, shell, host)
    if folder is None:
        with found.fetched() as proved:
            sizes = found.manifest.sizes() | {MANIFEST: len(found.data)}
            folder = checkpoint_actions.send_copy(found.manifest, proved, sizes, shell, host)
    return folder


class TargetPrune(msgspec.Struct, frozen=True):
    """What `checkpoint prune` removes of a job at a URL; see `to_prune`."""

    target: CheckpointTarget
    job: str
    removed: list[ListedCheckpoint]
    kept: list[ListedCheckpoint]

    @property
    def document(self) -> JsonObject:
        """What `checkpoint prune` prints."""
        return {
            "job": self.job, "host": self.target.target, "checkpoints": [each.document() for each in self.removed],
            "kept": [each.document() for each in self.kept], "copies": {},
        }  # fmt: skip

    def act(self) -> None:
        """Remove it."""
        for each in self.removed:
            self.target.remove(self.job, each.step)


def to_prune(home: Home, reference: str, keep: int) -> TargetPrune:
    """Return which checkpoints of URL/JOB `prune` would remove, by the rule of `steps_to_remove`; nothing is changed.

    Unfinished uploads stay: the job may be at work on them, and it removes them itself.
    """
    url, _, job = reference.rstrip("/").rpartition("/")
    target, record = CheckpointTarget(url), _record(home, job)
    manifests = [target.manifest(job, step)[0] for step in target.steps(job)]
    there = [
        ListedCheckpoint(job, each.step, each.time, each.bytes, each.metrics, target.place(job, each.step))
        for each in manifests
    ]
    if not there:
        raise errors.NoSuchCheckpoint(
            f"{url} has no checkpoints of {job}", hint=f"psctl checkpoint list {url}", where=reference
        )
    best = _keep_best(record, manifests, reference)
    away = set(steps_to_remove([(each.step, each.metrics) for each in there], keep, best))
    return TargetPrune(
        target, job, [each for each in there if each.step in away], [each for each in there if each.step not in away]
    )


def _keep_best(record: JobRecord | None, there: Sequence[Manifest], where: str) -> tuple[str, str] | None:
    """Return the job's `checkpoint.keep_best`: of this machine's record of it, else of its newest checkpoint."""
    if record is not None:
        return checkpoint_actions.keep_best(record)
    return checkpoint_actions.keep_best_in(there[-1].job_file, where) if there else None


def split_target(reference: str) -> tuple[str, str, str]:
    """Split URL/JOB@STEP into the URL, the job, and step, "latest" or "best".

    Raises:
        UsageError: it reads otherwise.
    """
    url, _, name = reference.rpartition("/")
    job, which = checkpoint_actions.split(name)
    return url, job, which


def _find(home: Home, reference: str) -> TargetCheckpoint:
    url, job, which = split_target(reference)
    target = CheckpointTarget(url)
    record, steps = _record(home, job), target.steps(job)
    step = int(which) if which.isdecimal() else steps[-1] if steps else None
    if which == "best":
        there = [target.manifest(job, each)[0] for each in steps]
        best = _keep_best(record, there, reference) or ("loss", "min")
        step = best_step([(each.step, each.metrics) for each in there], *best)
    if step is None or step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise errors.NoSuchCheckpoint(
            f"{url} has no checkpoint {which} of {job}; there are steps: {existing}",
            hint=f"psctl checkpoint list {url}",
            where=reference,
        )
    manifest, data = target.manifest(job, step)
    if (manifest.job, manifest.step) != (job, step):
        raise errors.CheckpointCorrupt(f"{reference}: its manifest is that of {manifest.id}", where=reference)
    return TargetCheckpoint(target, record, manifest, data)


def _record(home: Home, job: str) -> JobRecord | None:
    return next((each for each in home.jobs() if each.job == job), None)
