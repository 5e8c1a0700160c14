"""Lists, verifies and pulls checkpoints at a `checkpoint.to`, which this machine reaches itself: no host is asked.

A checkpoint there is named URL/JOB@STEP, with the URL of the job file's `checkpoint.to`. What lies there may have been
changed by others, so manifests are compared with this machine's record of the job where there is one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from psctl import errors
from psctl.checkpoint.catalog import CheckpointRow, ListedCheckpoint, best_step
from psctl.checkpoint.reader import folder_name
from psctl.checkpoint.upload import CheckpointTarget
from psctl.launch.checkpoints import checkpoint_actions, manifest_trust
from psctl.launch.home import Home, JobRecord


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


def verify_at(home: Home, reference: str) -> CheckpointRow:
    """Fetch every byte of a checkpoint and compare it with its manifest; return the row of `checkpoint verify`."""
    target, job, step = _find(home, reference)
    manifest, data = target.manifest(job, step)
    record = _record(home, job)
    problems = [fault] if (fault := manifest_trust.fault(record, data)) else []
    with tempfile.TemporaryDirectory(prefix="psctl-verify-") as here:
        try:
            target.fetch(job, step, Path(here) / folder_name(step))
        except errors.CheckpointCorrupt as error:
            problems.append(error.message)
    place = target.place(job, step)
    listed = ListedCheckpoint(job, step, manifest.time, manifest.bytes, manifest.metrics, place)
    return {**listed.verified_row(problems), "signed": manifest_trust.signer(record, data)}


def pull_from(home: Home, reference: str, folder: Path) -> tuple[Path, int]:
    """Bring a checkpoint to a new folder JOB@STEP of this machine, proved; return where it lies, and its bytes.

    Raises:
        UsageError: a file or folder of that name exists already.
        CheckpointCorrupt: it is damaged, or not signed as this machine's record of its job says.
    """
    target, job, step = _find(home, reference)
    here = folder / f"{job}@{step}"
    if os.path.lexists(here):
        raise errors.UsageError(f"{here} exists already", hint="name another folder, or remove it")
    wrong = manifest_trust.fault(_record(home, job), target.manifest(job, step)[1])
    if wrong:
        raise errors.CheckpointCorrupt(f"{reference}: {wrong}", where=reference)
    return here, target.fetch(job, step, here).bytes


def _find(home: Home, reference: str) -> tuple[CheckpointTarget, str, int]:
    url, _, name = reference.rpartition("/")
    job, which = checkpoint_actions.split(name)
    target = CheckpointTarget(url)
    steps = target.steps(job)
    step = int(which) if which.isdecimal() else steps[-1] if steps else None
    if which == "best":
        record = _record(home, job)
        best = (checkpoint_actions.keep_best(record) if record else None) or ("loss", "min")
        step = best_step([(each, target.manifest(job, each)[0].metrics) for each in steps], *best)
    if step is None or step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise errors.NoSuchCheckpoint(
            f"{url} has no checkpoint {which} of {job}; there are steps: {there}",
            hint=f"psctl checkpoint list {url}",
            where=reference,
        )
    return target, job, step


def _record(home: Home, job: str) -> JobRecord | None:
    return next((each for each in home.jobs() if each.job == job), None)
